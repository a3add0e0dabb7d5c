"""Estimates of what a wait is worth, against what playing the change really adds or spares."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.solve.rollout import FOREVER
from memopt.solve.search import Move
from memopt.solve.waits import AddedSeconds, SparedSeconds
from tests.solve.hand import STEP, A, B, G
from tests.solve.judged import JudgedSearch
from tests.solve.problems import step_problems

# H no longer reads A, so that A is there for B alone.
ALONE = dataclasses.replace(STEP, reads=((0,), (A,), (B, 3), (G,)))


def _state(problem, saved, hold=FOREVER):
    search = JudgedSearch(problem)
    days = [FOREVER if fixed else hold for fixed in search.rollout.fixed]
    state = search.play([storage in saved for storage in range(len(problem.sizes))], days)
    return search, state, search.finder.find(state.outcome)


def _added(problem, saved, early=0.0, hold=FOREVER):
    search, state, gaps = _state(problem, saved, hold)
    return AddedSeconds(search.rollout, state, gaps, early)


def test_a_dropped_copy_costs_its_operation_and_what_that_one_misses():
    assert _added(STEP, {A, B}).of(B, 2, True) == 2.0
    assert _added(STEP, {A, B}).of(A, 3, True) == 1.0
    assert _added(ALONE, {B}).of(B, 2, True) == 3.0  # A has to be recomputed as well
    assert _added(ALONE, {A, B}).of(B, 2, True) == 2.0


def test_what_is_recomputed_anyway_later_counts_by_the_share_given():
    # A is recomputed for operation 3 already; B dropped would have it one operation sooner.
    assert _added(STEP, {B}, early=0.0).of(B, 2, True) == 2.0
    assert _added(STEP, {B}, early=0.5).of(B, 2, True) == 2.5
    assert _added(STEP, {B}, early=1.0).of(B, 2, True) == 3.0
    assert _added(STEP, {B}).of(A, 4, True) == 0.0  # its forward copy waits for nothing


def test_a_copy_is_there_while_its_hold_lasts():
    # B recomputed for operation 3 would find the A that was recomputed for operation 2, or would not.
    assert _added(STEP, set(), early=1.0, hold=FOREVER).of(B, 5, False) == 2.0
    assert _added(STEP, set(), early=1.0, hold=1).of(B, 5, False) == 2.0
    assert _added(STEP, set(), early=1.0, hold=0).of(B, 5, False) == 3.0


def test_missing_names_what_would_be_recomputed_for_it_alone():
    assert _added(ALONE, {B}).missing(B, 2) == (A,)
    assert _added(ALONE, {A, B}).missing(B, 2) == ()
    assert _added(STEP, {B}).missing(B, 2) == ()  # A is recomputed anyway
    assert _added(STEP, {A, B}).missing(A, 3) == ()  # X is always there


def test_a_spared_recomputation_takes_along_what_was_made_for_it_alone():
    for problem, storage, seconds in ((STEP, A, 1.0), (STEP, B, 2.0), (ALONE, A, 1.0), (ALONE, B, 3.0)):
        search, state, gaps = _state(problem, set())
        assert SparedSeconds(search.rollout, state, gaps).of(storage) == seconds
        after = search.apply(state, [Move(storage, 1, 2, -1, 0.0)], True)
        assert state.seconds - after.seconds == seconds


@settings(max_examples=200)
@given(data=st.data(), problem=step_problems())
def test_a_forward_copy_dropped_where_copies_are_held_for_good_adds_exactly_what_was_said(data, problem):
    made = range(len(problem.sizes))
    search, state, gaps = _state(problem, {storage for storage in made if data.draw(st.booleans())})
    price = AddedSeconds(search.rollout, state, gaps, early=0.0)
    for storage, start, end, waits in zip(gaps.storage, gaps.start, gaps.end, gaps.waits, strict=True):
        if waits and start < problem.forward:
            after = search.apply(state, [Move(int(storage), int(start), int(end), -1, 0.0)], False)
            assert price.of(int(storage), int(end), True) == after.seconds - state.seconds
