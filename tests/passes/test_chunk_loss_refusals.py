"""Losses that the pass leaves as they are, and why."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memopt.passes.chunk_loss import ChunkLoss
from tests.passes.build import capture_joint, check, reasons
from tests.passes.test_chunk_loss import LOSSES, data
from tests.support import capture


def refused(function, *tensors, chunks=2):
    program = capture_joint(function, *tensors)
    result = check(ChunkLoss(chunks), program, *tensors)
    assert result.program is program
    return reasons(result)


REFUSED = {
    "sorted": (
        lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b).sort(0).values, t),
        {"sort": "aten.sort.default is not known to work row by row"},
    ),
    "dropped_rows": (
        lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b)[:-1], t[1:]),
        {"slice_1": "aten.slice.Tensor reads the logits, or what is as large, but gives no value per row"},
    ),
    "dropout": (
        lambda x, w, b, t: F.cross_entropy(F.dropout(F.linear(x, w, b), 0.5), t),
        {"native_dropout": "aten.native_dropout.default is not known to work row by row"},
    ),
    "over_rows": (
        lambda x, w, b, t: F.cross_entropy((y := F.linear(x, w, b)) - y.mean(0, keepdim=True), t),
        {"mean": "aten.mean.dim reads the logits, or what is as large, but gives no value per row"},
    ),
    "centred": (
        lambda x, w, b, t: F.cross_entropy((y := F.linear(x, w, b)) - y.sum(0, keepdim=True), t),
        {"sub": "it mixes the rows of sum_1"},
    ),
    "another_as_large": (
        lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b) + F.linear(x.tanh(), w), t),
        {"add": "it also reads addmm, which is as large as the logits"},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_by_rows_is_refused(name):
    function, expected = REFUSED[name]
    assert refused(function, *data()) == expected


def test_chunks_that_would_save_nothing_are_refused():
    x, weight, bias, labels = data()
    assert refused(LOSSES["mean"], x[:4].detach().requires_grad_(), weight, bias, labels[:4], chunks=None) == {
        "addmm": "chunks of its 4 rows would save 960 bytes and take 1408"
    }


def test_layers_without_a_loss_over_classes_are_left_alone():
    x, weight, bias, labels = data()
    assert (
        refused(lambda x, w, b, t: (F.linear(x, w, b).tanh() @ w).square().mean() + t.sum(), x, weight, bias, labels)
        == {}
    )


def test_inference_programs_are_returned_as_they_are():
    program = capture(nn.Linear(4, 4), torch.randn(8, 4))
    assert ChunkLoss().run(program).program is program


def test_a_random_operation_is_never_moved_behind_another():
    x, weight, bias, labels = data()

    def loss(x, weight, bias, labels):
        losses = F.cross_entropy(y := F.linear(x, weight, bias), labels, reduction="none")
        return F.dropout(losses, 0.5).sum() + y.logsumexp(-1).sum()

    assert refused(loss, x, weight, bias, labels) == {"native_dropout": "it would have to run later than it does"}
