"""The bound is never above the exact least peak, and says more than the largest operation does."""

import dataclasses

from hypothesis import given, settings

from memopt.solve.check import check
from memopt.solve.problem import StepProblem
from memopt.solve.schedule import Schedule
from tests.solve.bound import lower_bound
from tests.solve.hand import STEP, A, H
from tests.solve.oracle import least_peak
from tests.solve.problems import chain, step_problems


def _largest_operation(problem: StepProblem) -> int:
    """Return the most bytes that one operation touches, workspace included."""
    touched = (
        {*reads, *writes} - problem.resident for reads, writes in zip(problem.reads, problem.writes, strict=True)
    )
    return max(
        (sum(problem.sizes[s] for s in row) + more for row, more in zip(touched, problem.workspace, strict=True)),
        default=0,
    )


def test_each_reason_counts_on_a_step_counted_by_hand():
    assert lower_bound(STEP) == 33  # operation 1: A + B + workspace
    assert lower_bound(dataclasses.replace(STEP, workspace=(0, 0, 0, 9))) == 35  # operation 3: A + G + H + T, workspace
    assert lower_bound(dataclasses.replace(STEP, pinned=frozenset({A, H}))) == 39  # operation 2: pinned A, B, G, T
    fixed = dataclasses.replace(STEP, recomputable=(False, True, False, False))
    assert lower_bound(fixed) == 39  # operation 2: A cannot be recomputed, B, G, T


def test_what_a_later_forward_operation_reads_is_there():
    skip = StepProblem((8, 1, 2), ((), (), (0, 1)), ((0,), (1,), (2,)), (1.0,) * 3, (0, 4, 0), 3, (True,) * 3)
    assert lower_bound(skip) == 13  # operation 1 runs beside 8 bytes that it does not touch
    assert lower_bound(dataclasses.replace(skip, forward=0)) == 11  # in backward they may be recomputed later


def test_pinned_copies_are_there_later_in_forward_but_backward_may_run_in_another_order():
    apart = StepProblem((8, 1), ((), ()), ((0,), (1,)), (1.0,) * 2, (0, 4), 2, (True,) * 2, pinned=frozenset({0}))
    assert lower_bound(apart) == 13
    assert lower_bound(dataclasses.replace(apart, forward=0)) == 8
    check(dataclasses.replace(apart, forward=0), Schedule((1, 0), 0), 8, 8)


def test_what_had_to_run_long_before_counts_as_well():
    reads, writes = ((), (1,), (2,)), ((0, 1), (2,), ())
    line = StepProblem((8, 1, 1), reads, writes, (1.0,) * 3, (0, 0, 5), 0, (True,) * 3, pinned=frozenset({0}))
    assert lower_bound(line) == 14  # operation 2 beside the pinned output of operation 0, two links back


def test_a_step_without_operations_has_no_bound():
    assert lower_bound(StepProblem((7,), (), (), (), (), 0, ())) == 0


def test_a_chain_can_go_down_to_three_copies():
    assert lower_bound(chain(6, 5)) == least_peak(chain(6, 5)) == 15


def test_no_schedule_of_any_small_step_is_below_it_and_it_is_often_exact():
    drawn = exact = tighter = 0

    @settings(max_examples=300, database=None)
    @given(problem=step_problems(operations=8))
    def judge(problem):
        nonlocal drawn, exact, tighter
        bound, least, largest = lower_bound(problem), least_peak(problem), _largest_operation(problem)
        assert largest <= bound <= least
        drawn, exact, tighter = drawn + 1, exact + (bound == least), tighter + (bound > largest)

    judge()
    assert exact >= 0.8 * drawn
    assert tighter >= 0.3 * drawn
