"""The programs of one call before any pass."""

import pytest
import torch
from torch import nn

from memopt.difference.recorded import capture_programs, record_programs
from memopt.program import InputKind

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.norm(self.first(x))
        torch._dynamo.graph_break()
        return self.second(x)


@pytest.mark.parametrize("training", [False, True])
def test_graphs_come_in_order_with_the_values_of_their_inputs(training):
    model, x = Broken().train(training), torch.randn(3, 4)
    first, second = record_programs(model, (x,), {}, training=training)
    assert first.program.training == second.program.training == training
    for recorded in (first, second):
        kinds = [entry.kind for entry in recorded.program.inputs if entry.kind is not InputKind.CONSTANT]
        assert len(recorded.values) == len(kinds)
        for kind, value, entry in zip(kinds, recorded.values, recorded.program.inputs, strict=True):
            assert kind is not InputKind.PARAMETER or torch.equal(value, recorded.program.state[entry.name])
    assert any(value is not x and torch.equal(value, x) for value in first.values), "a copy, as it was"


def test_a_real_call_updates_buffers_and_a_captured_one_does_not():
    model, x = Broken(), torch.randn(3, 4)
    before = model.norm.running_mean.clone()
    programs = capture_programs(model, (x,), {}, training=True)
    assert [program.training for program in programs] == [True, True]
    assert torch.equal(model.norm.running_mean, before)
    torch._dynamo.reset()
    record_programs(model, (x,), {}, training=True)
    assert not torch.equal(model.norm.running_mean, before)
