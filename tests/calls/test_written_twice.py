"""Buffers that a checkpoint has eager write to twice: what is said of them."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def made(*, norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *[nn.BatchNorm1d(8)] * norm, nn.Tanh(), nn.Linear(8, 4))


def notes(run):
    return [note for note in run.report.notes if "within torch.utils.checkpoint" in note]


@pytest.mark.parametrize("budget", [None, "1GB"])
def test_a_checkpoint_around_the_call_is_told_where_buffers_are_written(budget, caplog):
    model, x = made(norm=True), torch.randn(16, 8, requires_grad=True)
    run = memopt.compile(model, budget, backend="aten")
    for _ in range(3):
        checkpoint(run, x, use_reentrant=False).sum().backward()
    (note,) = notes(run)
    assert "writes to 1.num_batches_tracked and 2 more" in note and note in caplog.text
    eager = made(norm=True)
    for _ in range(3):
        checkpoint(eager, x, use_reentrant=False).sum().backward()
    assert not torch.equal(eager[1].running_mean, model[1].running_mean), "else there is nothing to be said"
    torch.testing.assert_close(eager[0].weight.grad, model[0].weight.grad)


def test_nothing_is_said_without_such_buffers_or_without_a_checkpoint():
    x = torch.randn(16, 8, requires_grad=True)
    plain, normed = memopt.compile(made(norm=False), backend="aten"), memopt.compile(made(norm=True), backend="aten")
    checkpoint(plain, x, use_reentrant=False).sum().backward()
    normed(x).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        normed(x).sum().backward()
    assert not notes(plain) and not notes(normed)
