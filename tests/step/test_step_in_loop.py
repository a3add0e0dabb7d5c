"""A step beside what runs around its graphs: eager regions, and a loss that was not seen yet."""

from memopt.budget import parse_budget
from memopt.memory.resident import Resident
from memopt.memory.tangents import Tangents
from memopt.step.earlier_calls import Figures
from memopt.step.graph_peaks import GraphPeaks, step_peak
from memopt.step.loop_bytes import Seen
from memopt.step.step_in_loop import StepInLoop

PEAKS = GraphPeaks(forward=500, backward=800, saved=300, left=100)
GRAPH = Figures(PEAKS, PEAKS, base=1000, key="graph", program=None)


def test_what_runs_outside_of_graphs_lies_beside_them_and_is_counted_once():
    step = StepInLoop(parse_budget(3000), Resident(parameters=200))
    for _ in range(2):  # a call that is rehearsed again takes the place of the one before
        step.count_outside(700, 50, "a function", Tangents(early=10, loss=0, usual=0))
        assert (step.outside_bytes, step.outside_beside, step.resident.outside) == (700, 60, 60)
    assert "a function" in step.outside_places
    assert step.needed_around([GRAPH], Seen()) == 1000 + 60 + max(800, 300 + 700 - 60 + 10)
    with step.around_graphs():
        assert step_peak([PEAKS]) == max(800, 300 + 700 - 60 + 10)


def test_a_loss_is_allowed_for_until_it_was_seen():
    step = StepInLoop(parse_budget(3000), Resident())
    step.count_outside(0, 0, "", Tangents(early=0, loss=900, usual=600))
    assert step.loss_beside == 900
    with step.around_graphs():
        assert step_peak([PEAKS]) == 300 + 900
    with step.around_graphs(usual=True):
        assert step_peak([PEAKS]) == 300 + 600
    step.sees(Seen(between=40, known=True))
    assert step.loss_beside == 40
    with step.around_graphs():
        assert step_peak([PEAKS]) == 800


def test_of_a_budget_in_bytes_all_that_the_process_holds_is_a_part():
    in_bytes, fraction, none = (
        StepInLoop(budget and parse_budget(budget), Resident()) for budget in (3000, "50%", None)
    )
    assert (in_bytes.counts_all, fraction.counts_all, none.counts_all) == (True, False, False)
    assert in_bytes.usable_limit == 3000 and none.usable_limit is None
    fraction.reference.trains(4000, "step")
    assert fraction.usable_limit == 2000
