"""Calls of a model's modules: what each saves, and which may be recomputed."""

import copy

import torch
from torch import nn

from memopt.capture.module_calls import ModuleCalls
from memopt.step.module_checkpoints import ModuleCall


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.layer(x).tanh())


class Counts(nn.Module):
    """Writes to a list of its own."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(len(self.seen))
        return x.sin()


def found(model, x):
    calls = ModuleCalls()
    with calls.watching(copy.deepcopy(model)) as _:
        pass
    twin, calls = copy.deepcopy(model), ModuleCalls()
    with calls.watching(twin):
        twin(x).sum().backward()
    return calls.found()


def test_calls_come_in_order_with_what_they_lie_in():
    calls, nested = found(nn.Sequential(Block(), Block()), torch.randn(16, 8))
    assert [call.name for call in calls] == ["", "0", "0.layer", "0.drop", "1", "1.layer", "1.drop"]
    assert [item.parent for item in nested] == [None, 0, 1, 1, 0, 4, 4]
    assert [call.draws for call in calls] == [True, True, False, True, True, False, True]
    assert nested[1].gain > 0 and nested[1].recomputed > 0


def test_a_module_that_is_called_twice_has_two_calls():
    layer = nn.Linear(8, 8)
    calls, _ = found(nn.Sequential(layer, layer), torch.randn(4, 8))
    assert [(call.name, call.index) for call in calls[1:]] == [("0", 0), ("0", 1)]


def test_buffers_that_are_written_are_named():
    calls, _ = found(nn.Sequential(nn.BatchNorm1d(8)), torch.randn(4, 8))
    assert set(calls[1].writes) == {"running_mean", "running_var", "num_batches_tracked"}


def test_what_does_more_than_can_be_done_twice_gains_nothing():
    calls, nested = found(nn.Sequential(nn.Linear(8, 8), Counts()), torch.randn(4, 8))
    assert calls[2] == ModuleCall("1", 0) and nested[2].gain == 0
    assert nested[0].gain == 0, "nor does what it lies in"
