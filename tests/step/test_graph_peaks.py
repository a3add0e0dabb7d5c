"""The peak of a step by those of its graphs; what a graph's own are is in test_planner.py, beside the programs."""

from memopt.step.graph_peaks import GraphPeaks, between_graphs, step_peak


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
