"""UnpadProducts: what Inductor pads on a GPU is taken as it is; what is read otherwise stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table

from memopt.memory.timeline import timeline
from memopt.passes.chunk_loss import ChunkLoss
from memopt.passes.unpad_products import UnpadProducts
from tests.passes.build import capture_joint, check
from tests.passes.test_chunk_loss import LOSSES, assert_as_exact, data, products_of, results
from tests.passes.test_chunk_loss_columns import padded
from tests.support import apply

aten = torch.ops.aten


def shapes(program):
    return sorted(tuple(node.meta["val"].shape) for node in products_of(program))


@pytest.mark.parametrize("form", [None, select_decomp_table()], ids=["fused", "decomposed"])
@pytest.mark.parametrize("multiple", [8, 5])
def test_products_are_what_they_were_before_they_were_padded(form, multiple):
    tensors = data(columns=37)  # with 5, rows, columns and what is summed over are padded at once
    plain = capture_joint(LOSSES["scaled"], *tensors, decompositions=form)
    before = padded(plain, multiple)
    result = apply(UnpadProducts(), before)
    assert shapes(before) != shapes(plain) == shapes(result.program)
    assert not [
        node for node in result.program.calls if node.target in (aten.constant_pad_nd.default, aten.slice.Tensor)
    ]
    assert timeline(result.program).peak_bytes == timeline(plain).peak_bytes <= timeline(before).peak_bytes
    double = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors]
    assert_as_exact(result, before, tensors, capture_joint(LOSSES["scaled"], *double))
    assert result.changes[0].summary.endswith("without padding")


def test_then_the_loss_runs_in_chunks_as_it_would_have():
    tensors = data(columns=37)
    before = padded(capture_joint(LOSSES["mean"], *tensors), 8)
    after = apply(ChunkLoss(3), apply(UnpadProducts(), before).program)
    assert len(after.changes) == 1
    for found, expected in zip(results(after.program, tensors), results(before, tensors), strict=True):
        assert found is expected is None or torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def left_alone(function, *tensors):
    program = capture_joint(function, *tensors)
    assert check(UnpadProducts(), program, *tensors).program is program


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.pad(x, (0, 3)) @ F.pad(w, (0, 0, 3, 0)),  # zeros of one side meet numbers of the other
        lambda x, w: F.pad(x, (0, 3)) @ F.pad(w, (0, 0, 0, 3), value=1.0),
        lambda x, w: F.pad(x, (0, 0, 0, 2)) @ w,  # the rows that were added are read
        lambda x, w: (x @ F.pad(w, (0, 2)))[:, 1:],
        lambda x, w: (x @ F.pad(w, (0, 2)))[:, :-2],  # given to the caller, who sees its strides
        lambda x, w: F.pad(x, (0, -1)) @ F.pad(w, (0, 0, 0, -1)),  # cut off rather than padded
        lambda x, w: x @ w,
    ],
    ids=["other end", "ones", "rows read", "begins later", "returned", "cut", "plain"],
)
def test_other_products_are_left_alone(function):
    left_alone(function, torch.randn(6, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True))


def test_programs_without_a_backward_phase_are_left_alone():
    from tests.support import capture

    program = capture(torch.nn.Linear(4, 4), torch.randn(8, 4))
    assert UnpadProducts().run(program).program is program
