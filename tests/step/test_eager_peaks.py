"""What eager takes in graphs is known by their fingerprints; where it is not, the program says."""

from __future__ import annotations

import types

import torch

from memopt.memory.timeline import timeline
from memopt.step.eager_peaks import EagerPeaks
from memopt.step.graph_peaks import GraphPeaks, peaks_of, step_peak
from tests.passes.build import capture_joint

GRAPH = GraphPeaks(forward=110, backward=150, saved=100, left=20)


def test_what_was_counted_as_a_graph_was_lowered_is_of_it_from_then_on():
    eager = EagerPeaks()
    eager.lowered_is("unknown")
    eager.lowers(GRAPH)
    eager.lowered_is("one")
    eager.ends()
    eager.lowered_is("another")
    assert eager.lowered is None
    assert eager.of_step(["one"], 7, 0) == 150
    assert [eager.of_step(keys, 7, 0) for keys in (["unknown"], ["another"], ["one", "another"])] == [7, 7, 7]


def test_a_step_of_several_graphs_takes_no_more_than_it_was_counted_to():
    eager = EagerPeaks()
    eager.lowers(GRAPH)
    eager.lowered_is("one")
    eager.takes(GraphPeaks(forward=100, backward=120, saved=90, left=20))
    assert eager.step == 120
    assert eager.of_step(["one"], 7, 0) == 120 and eager.of_step(["one"], 7, 30) == 90
    assert eager.of_step(["other"], 7, 0) == 7
    eager.takes(None)
    assert eager.of_step(["one"], 7, 0) == 150


def test_of_a_graph_that_is_not_known_it_is_what_its_program_takes():
    program = capture_joint(lambda x, w: (x @ w).sum(), torch.randn(4, 8), torch.randn(8, 8, requires_grad=True))
    line = timeline(program)
    own, planned = peaks_of(program, line), types.SimpleNamespace(program=program, timeline=line)
    eager = EagerPeaks()
    assert eager.of("one", program, line) == own
    assert eager.of_calls([GRAPH], ["one"], [planned]) == step_peak([GRAPH, own])
    eager.lowers(GRAPH)
    eager.lowered_is("one")
    assert eager.of("one", program, line) == GRAPH
    assert eager.of_calls([GRAPH], ["one"], [planned]) == step_peak([GRAPH, GRAPH]) == 250
