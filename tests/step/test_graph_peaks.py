"""The peak of a step by those of its graphs; what a graph's own are is in test_planner.py, beside the programs."""

import dataclasses

import torch

from memopt.memory.timeline import timeline
from memopt.program import InputKind
from memopt.step.graph_peaks import GraphPeaks, between_graphs, peaks_of, step_peak
from tests.passes.build import capture_joint


def test_the_peak_of_a_step_counts_what_other_graphs_hold():
    first, second = GraphPeaks(10, 20, 5, 3), GraphPeaks(7, 9, 2, 1)
    assert step_peak([first]) == 20
    assert step_peak([second, first]) == max(7, 9 + 3, 2 + 10, 2 + 20)


def test_what_lies_between_graphs_is_there_beside_what_they_save():
    first, second = GraphPeaks(10, 20, 5, 3), GraphPeaks(7, 9, 2, 1)
    with between_graphs(40):
        assert step_peak([second, first]) == 40 + 5 + 2
    with between_graphs(0, forward=15):
        assert step_peak([second, first]) == 2 + 10 + 15


def test_of_the_gradient_of_a_sharded_parameter_a_shard_stays():
    program = capture_joint(lambda x, w: (x @ w).sum(), torch.randn(4, 8), torch.randn(8, 8, requires_grad=True))
    line = timeline(program)
    (parameter,) = (entry for entry in program.inputs if entry.kind is InputKind.PARAMETER)
    inputs = [dataclasses.replace(entry, shard_bytes=100) if entry is parameter else entry for entry in program.inputs]
    sharded = peaks_of(dataclasses.replace(program, inputs=tuple(inputs)), line)
    whole = peaks_of(program, line)
    assert whole.gradients == ((parameter.target, 256),) and sharded.gradients == ((parameter.target, 100),)
    assert whole.left - sharded.left == 156
