"""The judge accepts what is right and refuses each kind of broken schedule with its reason."""

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memopt.solve.check import check
from memopt.solve.schedule import Schedule, ScheduleError, simulate
from tests.solve.hand import KEEP_ALL, REMAKE_A, STEP, A
from tests.solve.problems import step_problems


@pytest.mark.parametrize(("steps", "peak"), [(KEEP_ALL, 39), (REMAKE_A, 33), ((0, 1, 0, 1, 2, 0, 3), 37)])
def test_right_schedules_are_accepted(steps, peak):
    check(STEP, Schedule(steps, 2), peak)
    check(STEP, Schedule(steps, 2), peak, peak)


@pytest.mark.parametrize(
    ("steps", "forward", "peak", "limit", "message"),
    [
        ((1, 0, 2, 3), 2, 39, None, "forward order changed"),
        ((0, 0, 1, 2, 3), 2, 39, None, "forward order changed"),
        (KEEP_ALL, 1, 39, None, "forward order changed"),
        ((0, 1, 3), 2, 39, None, r"missing or unknown operations: \[2\]"),
        ((0, 1, 2, 3, 4), 2, 39, None, r"missing or unknown operations: \[4\]"),
        ((0, 1, 3, 2), 2, 39, None, r"step 2 \(operation 3\) reads storage 4 before it is written"),
        ((0, 1, 2, 3, 2), 2, 39, None, "step 4 runs operation 2 again, which must not be recomputed"),
        (KEEP_ALL, 2, 38, None, "the peak is 39 bytes, not 38 as claimed"),
        (REMAKE_A, 2, 39, None, "the peak is 33 bytes, not 39 as claimed"),
        (KEEP_ALL, 2, 39, 38, "the peak of 39 bytes is over the limit of 38 bytes"),
    ],
)
def test_broken_schedules_are_refused(steps, forward, peak, limit, message):
    with pytest.raises(ScheduleError, match=message):
        check(STEP, Schedule(steps, forward), peak, limit)


def test_a_claim_that_frees_a_pinned_copy_is_refused():
    pinned = dataclasses.replace(STEP, pinned=frozenset({A}))
    # With A freed after forward the step would peak at 33 bytes; the caller's copy makes it 39.
    with pytest.raises(ScheduleError, match="the peak is 39 bytes, not 33"):
        check(pinned, Schedule(REMAKE_A, 2), 33)
    check(pinned, Schedule(REMAKE_A, 2), 39)
    check(pinned, Schedule((0, 1, 0, 2, 3), 2), 49)


@settings(max_examples=200)
@given(problem=step_problems(), data=st.data())
def test_it_agrees_with_the_simulator_on_schedules_nobody_would_choose(problem, data):
    steps = list(range(len(problem.reads)))
    again = [operation for operation in steps if problem.recomputable[operation]]
    assume(again)
    for operation in data.draw(st.lists(st.sampled_from(again), max_size=6)):
        lowest = max(problem.forward, operation + 1)
        steps.insert(data.draw(st.integers(lowest, max(lowest, len(steps)))), operation)
    schedule = Schedule(tuple(steps), problem.forward)
    try:
        peak = simulate(problem, schedule).peak_bytes
    except ScheduleError as refusal:
        with pytest.raises(ScheduleError, match=str(refusal).replace("(", r"\(").replace(")", r"\)")):
            check(problem, schedule, 0)
        return
    check(problem, schedule, peak)
    with pytest.raises(ScheduleError, match="as claimed"):
        check(problem, schedule, peak + 1)
