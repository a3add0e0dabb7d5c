"""Rewriting: which passes a model's steps get, by the way they run."""

import memopt
from memopt.backends.aten import AtenBackend
from memopt.backends.inductor import InductorBackend
from memopt.memory.cost.table import CostTable
from memopt.passes.checkpoint import Checkpoint
from memopt.passes.chunk_loss import ChunkLoss
from memopt.passes.eliminate_copies import EliminateCopies
from memopt.step.rewriting import Rewriting


def test_passes_are_those_that_are_given_or_all_for_training():
    given = [EliminateCopies(), Checkpoint()]
    assert Rewriting(given, AtenBackend(), CostTable()).passes == tuple(given)
    assert Rewriting(None, AtenBackend(), CostTable()).passes == memopt.TRAINING


def test_what_runs_operator_by_operator_stores_every_value_in_the_given_order():
    rewriting = Rewriting(None, InductorBackend(), CostTable())
    exact, code = rewriting.stages(True), rewriting.stages(False)
    assert exact.fusion is None and not exact.arranges
    assert code.fusion is not None and code.arranges
    rewriting.arranges = False
    assert not rewriting.stages(False).arranges


def test_rewrites_are_called_by_their_keys_in_their_order():
    rewriting = Rewriting([EliminateCopies(), ChunkLoss(), Checkpoint()], AtenBackend(), CostTable())
    (loss,) = rewriting.stages(True).lowering
    assert rewriting.called([loss.key], True) == (loss,)
    assert rewriting.called(["another"], True) is None


def test_what_passes_made_is_forgotten():
    rewriting = Rewriting(None, AtenBackend(), CostTable())
    (before,), (again,) = rewriting.kept.of(rewriting.passes[:1]), rewriting.kept.of(rewriting.passes[:1])
    assert before is again
    rewriting.forget()
    assert rewriting.kept.of(rewriting.passes[:1])[0] is not before
