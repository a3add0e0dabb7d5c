"""Ruin and repair: right schedules only, nothing known is lost, better levels and a lower floor than the way down."""

import dataclasses
import math

import pytest
from hypothesis import given, settings

from memopt.solve.descend import refine, seed, slide
from memopt.solve.improve import Improver
from tests.solve.bound import lower_bound
from tests.solve.judged import JudgedSearch, covers, front
from tests.solve.problems import skips, step_problems


def _descended(problem):
    search = JudgedSearch(problem, math.inf)
    seed(search)
    slide(search, math.inf)
    return search, refine(search, 0, math.inf)


@pytest.mark.parametrize("which", range(4))
def test_it_finds_faster_states_at_known_levels_and_loses_none(which):
    search, levels = _descended(skips(20, which))
    before = front(search)
    search.allow(20_000)
    Improver(search).run(levels, patience=1000)
    after = front(search)
    assert covers(after, before) and not covers(before, after)
    assert after[0][0] >= lower_bound(search.problem)
    assert after[-1][1] == search.problem.base_seconds


def test_it_looks_for_a_lower_floor():
    search, levels = _descended(skips(20, 1))
    floor = search.archive.states[0].peak
    search.allow(20_000)
    Improver(search).run(levels, patience=1000)
    assert search.archive.states[0].peak < floor


def test_it_ends_after_as_many_vain_rounds_as_allowed():
    search, levels = _descended(skips(12, 0))
    played = len(search.played)
    Improver(search).run(levels, patience=0)
    assert len(search.played) == played
    Improver(search).run(levels, patience=30)  # no other bound: it returns since rounds become vain
    assert len(search.played) > played


def test_a_late_search_or_one_with_nothing_to_recompute_is_left_alone():
    search, levels = _descended(skips(12, 0))
    fixed, fixed_levels = _descended(dataclasses.replace(skips(12, 0), recomputable=(False,) * 24))
    search.allow(-1)
    for some, their_levels in ((search, levels), (fixed, fixed_levels)):
        before = len(some.played)
        Improver(some).run(their_levels, patience=10)
        assert len(some.played) == before


def test_the_same_seed_finds_the_same():
    fronts = []
    for _ in range(2):
        search, levels = _descended(skips(20, 3))
        search.allow(5_000)
        Improver(search).run(levels, patience=1000)
        fronts.append((front(search), len(search.played)))
    assert fronts[0] == fronts[1]


@settings(max_examples=40)
@given(problem=step_problems())
def test_whatever_it_ruins_stays_a_right_schedule(problem):
    search, levels = _descended(problem)
    before = front(search)
    search.allow(3_000)
    Improver(search).run(levels, patience=60)
    assert covers(front(search), before)
    assert search.archive.states[-1].seconds == problem.base_seconds
