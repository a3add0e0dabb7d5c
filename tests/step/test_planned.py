"""Graphs of a step together: their peak, predicted and measured, and what tells one graph from another."""

import dataclasses

import pytest
import torch

from memopt.memory.timeline import timeline
from memopt.step import planned as planned_module
from memopt.step.graph_peaks import peaks_of, step_peak
from memopt.step.planned import Planned, constant_bytes, fingerprint, measured_peak, predicted_peak
from tests.passes.build import capture_joint
from tests.support import capture

W = torch.linspace(-0.3, 0.3, 32 * 32).reshape(32, 32)


def program(rows=16, layers=2):
    def function(x, w):
        for _ in range(layers):
            x = torch.nn.functional.gelu(x @ w)
        return (x,)

    return capture_joint(function, torch.ones(rows, 32), W.clone().requires_grad_())


def planned(item, measured=None):
    line = timeline(item)
    return Planned(item, item, item, line, line, (), {}, measured=measured)


def test_the_peak_of_several_graphs_is_that_of_the_step():
    items = [planned(program()), planned(program(layers=4))]
    assert predicted_peak(items) == step_peak([peaks_of(item.program, item.timeline) for item in items])
    assert predicted_peak(items) > max(predicted_peak([item]) for item in items)


def test_what_a_graph_took_more_than_predicted_moves_the_step_as_much():
    item = planned(program())
    line = item.timeline
    assert measured_peak([dataclasses.replace(item, measured=line.peak_bytes + 100)], 0) == line.peak_bytes + 100
    assert measured_peak([dataclasses.replace(item, measured=line.peak_bytes), item], 7) == 7


@pytest.mark.parametrize("changed", [{"rows": 8}, {"layers": 3}])
def test_a_fingerprint_tells_sizes_and_operators_apart(changed):
    assert fingerprint(program()) == fingerprint(program())
    assert fingerprint(program()) != fingerprint(program(**changed))


def test_a_program_is_read_once_for_its_fingerprint(monkeypatch):
    read, digest = [], planned_module._digest
    monkeypatch.setattr(planned_module, "_digest", lambda item: read.append(item) or digest(item))
    item = program()
    other = item.copy()
    assert fingerprint(item) == fingerprint(item) == fingerprint(other)
    assert read == [item, other]


def test_constants_count_once_unless_they_are_a_parameter():
    shared = torch.ones(64)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64))
            self.first, self.second, self.view = shared, shared[:32], self.weight.detach()

        def forward(self, x):
            return x * self.weight + self.first + self.second.sum() + self.view

    found = capture(Model().eval(), torch.ones(64))
    assert constant_bytes(found) == shared.nbytes
