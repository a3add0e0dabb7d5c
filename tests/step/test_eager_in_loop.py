"""The most that eager takes in its loop is of one moment of the step, not the sum of what each moment holds."""

from __future__ import annotations

import dataclasses

from memopt.step.eager_in_loop import eager_in_loop
from memopt.step.graph_peaks import GraphPeaks
from memopt.step.loop_bytes import Loop

GRAPH = GraphPeaks(forward=110, backward=150, saved=100, left=20)


def test_each_moment_is_of_what_the_loop_holds_then():
    assert eager_in_loop([GRAPH], Loop(0, 0, 0, False)) == 150
    assert eager_in_loop([GRAPH], Loop(60, 0, 0, False)) == 170  # an earlier output, gone in backward
    assert eager_in_loop([GRAPH], Loop(0, 90, 0, False)) == 190
    assert eager_in_loop([GRAPH], Loop(0, 90, -10, False)) == 190
    assert eager_in_loop([GRAPH], Loop(60, 90, 70, False)) == 220


def test_what_is_saved_stays_where_the_graph_is_kept_for_another_backward():
    assert eager_in_loop([GRAPH], Loop(0, 0, 0, True), kept=80) == 230
    assert eager_in_loop([GRAPH], Loop(0, 0, 0, False), kept=80) == 150


def test_calls_of_one_step_are_saved_together():
    assert eager_in_loop([GRAPH, GRAPH], Loop(0, 90, 0, False)) == 290
    assert eager_in_loop([GRAPH, GRAPH], Loop(0, 0, 0, False)) == 250


def test_regions_between_graphs_count_to_what_is_known_of_the_whole_step():
    loop = Loop(10, 0, 0, False)
    assert eager_in_loop([GRAPH], loop, between=90, beside=5) == 205
    assert eager_in_loop([GRAPH], loop, between=90, beside=5, most=160) == 170


def test_backward_from_the_loss_alone_is_counted_where_the_loop_begins_with_that():
    graph = dataclasses.replace(GRAPH, alone=120)
    assert eager_in_loop([graph], Loop(0, 0, 0, False)) == 150
    assert eager_in_loop([graph], Loop(0, 0, 0, False, alone=True)) == 120
    assert eager_in_loop([GRAPH], Loop(0, 0, 0, False, alone=True)) == 150
    assert eager_in_loop([graph, graph], Loop(0, 0, 0, False, alone=True)) == 250  # of one call it is not known
