"""A decision leads to the schedule it describes, with exactly the bytes and seconds that judge and simulator count."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.solve.check import check
from memopt.solve.problem import StepProblem
from memopt.solve.rollout import FOREVER, Rollout
from memopt.solve.schedule import Schedule, simulate
from tests.solve.hand import KEEP_ALL, REMAKE_A, STEP, A, B, G, H, T, X
from tests.solve.judged import decisions
from tests.solve.problems import chain, step_problems


@pytest.mark.parametrize(
    ("saved", "steps", "live"),
    [
        ({A, B}, KEEP_ALL, [10, 33, 39, 26]),
        ({B}, REMAKE_A, [10, 33, 29, 19, 26]),
        # B is recomputed from A, which then waits for operation 3 as long as its hold says: for good.
        (set(), (0, 1, 0, 1, 2, 3), [10, 30 + 3, 14, 37, 39, 26]),
    ],
)
def test_what_is_not_saved_is_made_again_just_before_its_read(saved, steps, live):
    outcome = Rollout(STEP).play([storage in saved for storage in range(6)], [FOREVER] * 6)
    assert tuple(outcome.steps) == steps
    assert outcome.live.tolist() == live
    assert (outcome.peak_bytes, outcome.peak_step) == (max(live), live.index(max(live)))
    assert outcome.seconds == sum(STEP.costs[operation] for operation in steps)
    assert [steps[base] for base in outcome.bases] == [2, 3]


def test_only_what_may_be_recomputed_is_not_fixed():
    assert [storage for storage, fixed in enumerate(Rollout(STEP).fixed) if fixed] == [X, T, G, H]


def test_bytes_of_what_is_not_counted_are_zero():
    assert Rollout(STEP).sizes.tolist() == [0, 10, 20, 4, 5, 7]
    no_backward = StepProblem((3, 4), ((),), ((0,),), (1.0,), (0,), 1, (True,), arriving=frozenset({1}))
    assert Rollout(no_backward).sizes.tolist() == [3, 0]
    assert Rollout(no_backward).play([True] * 2, [FOREVER] * 2).live.tolist() == [3]


@pytest.mark.parametrize(
    ("days", "steps"),
    [
        (0, (0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 0, 1, 0)),  # dropped after each backward operation
        (1, (0, 1, 2, 3, 0, 1, 2, 3, 0, 1)),  # every other one still finds its copy
        (FOREVER, (0, 1, 2, 3, 0, 1, 2, 3)),
    ],
)
def test_a_hold_counts_backward_operations(days, steps):
    problem = chain(4)
    hold = [FOREVER if fixed else days for fixed in Rollout(problem).fixed]
    outcome = Rollout(problem).play([False] * 9, hold)
    assert tuple(step for step in outcome.steps if step < 4) == steps


def test_a_step_without_operations_takes_nothing():
    outcome = Rollout(StepProblem((7,), (), (), (), (), 0, ())).play([True], [FOREVER])
    assert (outcome.steps, outcome.peak_bytes, outcome.peak_step, outcome.seconds) == ([], 0, -1, 0.0)


@settings(max_examples=250)
@given(data=st.data(), problem=step_problems())
def test_every_decision_is_a_right_schedule_measured_exactly(data, problem):
    saved, hold = data.draw(decisions(problem))
    rollout = Rollout(problem)
    outcome = rollout.play(saved, hold)
    schedule = Schedule(tuple(outcome.steps), problem.forward)
    check(problem, schedule, outcome.peak_bytes)
    trace = simulate(problem, schedule)
    assert tuple(outcome.live.tolist()) == trace.live_bytes
    assert (outcome.peak_bytes, outcome.peak_step) == (trace.peak_bytes, trace.peak_step)
    assert outcome.seconds == trace.seconds  # whole numbers, so no rounding
    assert [outcome.steps[base] for base in outcome.bases] == list(range(problem.forward, len(problem.reads)))
    # Nothing waits for backward but what is saved or cannot be recomputed.
    assert all(saved[storage] or rollout.fixed[storage] for storage in trace.saved)
    assert rollout.play(saved, hold).steps == outcome.steps  # playing leaves no trace


@settings(max_examples=100)
@given(problem=step_problems())
def test_all_saved_and_held_forever_recomputes_nothing(problem):
    everything = len(problem.sizes)
    outcome = Rollout(problem).play([True] * everything, [FOREVER] * everything)
    assert outcome.steps == list(range(len(problem.reads)))
    assert outcome.seconds == problem.base_seconds
