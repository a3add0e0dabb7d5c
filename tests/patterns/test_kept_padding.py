"""Padded columns that are kept: nothing is cut or padded between two products, and no number of a row changes."""

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table

from memopt.passes.chunk_loss import ChunkLoss
from tests.passes.build import arguments, capture_joint
from tests.support import apply

aten = torch.ops.aten
ROWS, WIDTH, COLUMNS = 32, 8, 37


def tensors(dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    return x, torch.randn(COLUMNS, WIDTH).to(dtype).requires_grad_(), torch.randint(0, COLUMNS, (ROWS,))


LOSSES = {
    "plain": lambda x, w, t: F.cross_entropy(F.linear(x, w).float(), t),
    "capped": lambda x, w, t: F.cross_entropy(torch.tanh(F.linear(x, w) / 5) * 5, t),
    "smoothing": lambda x, w, t: F.cross_entropy(F.linear(x, w), t, label_smoothing=0.1),
    "shifted by columns": lambda x, w, t: F.cross_entropy(F.linear(x, w) + torch.ones(COLUMNS), t),
    "divided by columns": lambda x, w, t: F.cross_entropy(F.linear(x, w) / torch.full((COLUMNS,), 2.0), t),
}


def chunked(loss, given):
    before = capture_joint(loss, *given, decompositions=select_decomp_table())
    result = apply(ChunkLoss(2, multiple=8), before)
    assert len(result.changes) == 1
    return before, result.program


def padded(program):
    """Per-row values that are padded to more columns."""
    found = [node for node in program.calls if node.target is aten.constant_pad_nd.default]
    return [node for node in found if node.meta["val"].shape[0] not in (COLUMNS, COLUMNS + 3)]


def columns(program, *targets):
    return {node.meta["val"].shape[-1] for node in program.calls if node.target in targets}


def test_between_the_products_every_value_has_their_columns():
    _, program = chunked(LOSSES["plain"], tensors())
    assert not padded(program)
    assert columns(program, aten.exp.default, aten.sub.Tensor) == {COLUMNS + 3}
    cuts = [n for n in program.calls if n.target is aten.slice.Tensor and n.meta["val"].shape[-1] == COLUMNS]
    assert {user.target for cut in cuts for user in cut.users} == {aten.gather.default}, "a wrong label stays one"
    wheres = [n for n in program.calls if n.target is aten.where.self and n.meta["val"].shape[-1] == COLUMNS + 3]
    assert len(wheres) == 2, "the logits of each chunk once: their gradients are known to be zero there"


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_numbers_are_those_of_the_rows_without_padding(name, scale):
    x, weight, labels = tensors()
    given = ((x.detach() * scale).requires_grad_(), weight, labels)
    before, program = chunked(LOSSES[name], given)
    expected = before.run(*arguments(before, *given))
    for found, true in zip(program.run(*arguments(program, *given)), expected, strict=True):
        assert (found is None) == (true is None)
        if true is not None:
            assert found.isfinite().all() and found.shape == true.shape
            torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-5 * float(true.abs().max()))


def test_columns_that_are_not_known_to_be_neutral_are_overwritten_before_a_sum_reads_them():
    _, program = chunked(LOSSES["capped"], tensors())
    for node in program.calls:
        if node.target in (aten.amax.default, aten.sum.dim_IntList) and node.args[1] in ([1], [-1]):
            source = node.args[0]
            if source.meta["val"].shape[-1] == COLUMNS + 3 and node.target is aten.amax.default:
                assert source.target is aten.where.self


@pytest.mark.parametrize("row", [float("inf"), float("-inf"), float("nan")])
def test_rows_that_are_not_finite_leave_the_others_as_they_are(row):
    x, weight, labels = tensors()
    x = x.detach()
    x[3] = row
    given = (x.requires_grad_(), weight, labels)
    loss = lambda x, w, t: F.cross_entropy(F.linear(x, w), t, reduction="none").sum()  # noqa: E731
    before, program = chunked(loss, given)
    found, true = (p.run(*arguments(p, *given))[1] for p in (program, before))
    others = torch.arange(ROWS) != 3
    torch.testing.assert_close(found[others], true[others])
    assert not found[3].isfinite().any() and not true[3].isfinite().any()


def test_a_fused_loss_is_left_with_its_own_columns():
    before = capture_joint(LOSSES["plain"], *tensors())
    program = apply(ChunkLoss(2, multiple=8), before).program
    assert columns(program, aten._log_softmax.default) == {COLUMNS}
