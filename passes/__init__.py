"""The rewrites, one per file, and the two pipelines: explicit tuples in order."""

from memopt.pass_manager import Pass
from memopt.passes.channels_last import ChannelsLast
from memopt.passes.checkpoint import Checkpoint
from memopt.passes.chunk_loss import ChunkLoss
from memopt.passes.compress_masks import CompressMasks
from memopt.passes.eliminate_copies import EliminateCopies
from memopt.passes.eliminate_dead import EliminateDead
from memopt.passes.fold_activation import FoldActivation
from memopt.passes.fold_constants import FoldConstants
from memopt.passes.fuse_attention import FuseAttention
from memopt.passes.fuse_conv_bn import FuseConvBn
from memopt.passes.fuse_matmul_add import FuseMatmulAdd
from memopt.passes.fuse_norm import FuseNorm
from memopt.passes.inplace import Inplace
from memopt.passes.merge_common import MergeCommon
from memopt.passes.read_parts import ReadParts
from memopt.passes.reorder import Reorder
from memopt.passes.shrink_indices import ShrinkIndices
from memopt.passes.split_batch import SplitBatch
from memopt.passes.split_recurrence import SplitRecurrence
from memopt.passes.sum_lookups import SumLookups
from memopt.passes.unpad_products import UnpadProducts

INFERENCE: tuple[Pass, ...] = (
    ReadParts(),
    EliminateCopies(),
    FuseConvBn(),
    FoldConstants(),
    MergeCommon(),
    FuseAttention(),
    FuseNorm(),
    FuseMatmulAdd(),
    FoldActivation(),
    EliminateDead(),
    Reorder(),
    Inplace(),
)
TRAINING: tuple[Pass, ...] = (
    ChannelsLast(),
    ReadParts(),
    EliminateCopies(),
    MergeCommon(),
    EliminateDead(),
    UnpadProducts(),
    SumLookups(),
    ShrinkIndices(),
    CompressMasks(),
    ChunkLoss(),
    SplitBatch(),
    SplitRecurrence(),
    Checkpoint(),
    Inplace(),
)
