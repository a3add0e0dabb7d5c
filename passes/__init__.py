"""The rewrites, one per file, and the two pipelines: explicit tuples in order."""

from memopt.pass_manager import Pass
from memopt.passes.checkpoint import Checkpoint
from memopt.passes.eliminate_copies import EliminateCopies
from memopt.passes.eliminate_dead import EliminateDead
from memopt.passes.fold_constants import FoldConstants
from memopt.passes.merge_common import MergeCommon

INFERENCE: tuple[Pass, ...] = (EliminateCopies(), FoldConstants(), MergeCommon(), EliminateDead())
TRAINING: tuple[Pass, ...] = (EliminateCopies(), MergeCommon(), EliminateDead(), Checkpoint())
