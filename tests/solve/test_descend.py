"""The way down: every decision on it is right, nothing known is lost, and small steps reach the exact floor."""

import itertools
import math

import pytest
from hypothesis import given, settings

from memopt.solve import descend
from memopt.solve.descend import refine, seed, slide, work_on
from memopt.solve.rollout import FOREVER
from tests.solve.hand import STEP
from tests.solve.judged import JudgedSearch, covers, front
from tests.solve.oracle import least_peak, least_seconds
from tests.solve.problems import chain, skips, step_problems


def _seeded(problem, operations=100_000):
    search = JudgedSearch(problem, operations)
    seed(search)
    return search


def _lowest(front_, limit):
    return min((seconds for peak, seconds in front_ if peak <= limit), default=math.inf)


def test_the_seed_knows_the_step_that_recomputes_nothing():
    for problem in (STEP, chain(6), skips(20, 0)):
        search = _seeded(problem)
        assert search.played[0].outcome.steps == list(range(len(problem.reads)))
        assert front(search)[-1][1] == problem.base_seconds
    assert len(front(search)) > 3  # prices found more than the two ends


def test_sliding_reaches_the_floor_of_a_step_counted_by_hand():
    search = JudgedSearch(STEP)
    search.fastest()
    slide(search, math.inf)
    assert front(search) == [(33, 16.0), (39, 15.0)]


def test_sliding_ends_where_it_gets_too_dear():
    problem = skips(20, 0)
    unpaid, little, all_ = (_seeded(problem) for _ in range(3))
    before = front(unpaid)
    slide(unpaid, problem.base_seconds - 1)
    assert front(unpaid) == before
    slide(little, problem.base_seconds * 1.02)
    slide(all_, math.inf)
    assert covers(front(all_), front(little)) and covers(front(little), before)
    assert front(all_)[0][0] < front(little)[0][0]
    assert len(all_.played) > len(little.played) > len(unpaid.played)


@pytest.mark.parametrize("limit", [0, 110, 1 << 30])
def test_levels_fall_to_the_limit_or_the_floor(limit):
    search = _seeded(skips(20, 0))
    slide(search, math.inf)
    top, floor = search.archive.states[-1].peak, search.archive.states[0].peak
    levels = refine(search, limit, math.inf)
    assert levels == sorted(set(levels), reverse=True)
    assert levels[-1] == max(limit, floor) and (levels[0] < top or limit >= top)
    assert all(after >= int(before * 0.95) for before, after in itertools.pairwise(levels))


def test_refining_never_loses_a_level_and_gains_some():
    search = _seeded(skips(20, 1))
    slide(search, math.inf)
    before = front(search)
    levels = refine(search, 0, math.inf)
    after = front(search)
    assert covers(after, before)
    assert any(_lowest(after, level) < _lowest(before, level) for level in levels)


def test_refining_skips_what_is_too_dear_and_stops_when_late():
    search = _seeded(skips(20, 1))
    slide(search, math.inf)
    played = len(search.played)
    refine(search, 0, search.problem.base_seconds - 1)
    assert len(search.played) == played
    search.allow(-1)
    assert refine(search, 0, math.inf)[-1] == search.archive.states[0].peak
    assert len(search.played) == played


def test_between_two_neighbours_part_of_the_lower_one_is_enough():
    problem = skips(20, 2)
    search = JudgedSearch(problem, math.inf)
    fastest = search.fastest()
    slow = search.play([False] * len(problem.sizes), [FOREVER if fixed else 0 for fixed in search.rollout.fixed])
    level = (fastest.peak + slow.peak) // 2
    assert slow.peak < level < fastest.peak and len(front(search)) == 2
    work_on(search, level)
    best = search.archive.best(level)
    assert best.peak <= level and problem.base_seconds < best.seconds < slow.seconds
    assert covers(front(search), [(fastest.peak, fastest.seconds), (slow.peak, slow.seconds)])


def test_small_steps_nearly_always_reach_the_exact_floor_and_the_exact_seconds():
    drawn = floors = levels = exact = 0

    @settings(max_examples=150, database=None)
    @given(problem=step_problems(operations=8))
    def judge(problem):
        nonlocal drawn, floors, levels, exact
        search = _seeded(problem, 20_000)
        known = [front(search)]
        slide(search, math.inf)
        known.append(front(search))
        refine(search, 0, math.inf)
        known.append(front(search))
        assert all(covers(after, before) for before, after in itertools.pairwise(known))
        floor, top = known[-1][0][0], known[-1][-1][0]
        assert floor >= least_peak(problem)
        drawn, floors = drawn + 1, floors + (floor == least_peak(problem))
        for level in {floor, (floor + top) // 2}:
            best, least = search.archive.best(level).seconds, least_seconds(problem, level)
            assert best >= least
            levels, exact = levels + 1, exact + (best == least)

    judge()
    assert floors >= 0.9 * drawn
    assert exact >= 0.9 * levels


def test_what_is_found_between_two_neighbours_may_displace_the_one_above(monkeypatch):
    search = _seeded(skips(20, 0))
    states = search.archive.states
    level = states[-2].peak
    joined = []

    def found(search, low, high, target, low_first):
        joined.append((low, high, low_first))
        del search.archive.states[-1]  # one with as few bytes, and faster

    monkeypatch.setattr(descend, "_relax_join", found)
    low, high = states[-2:]
    descend._join(search, level)
    assert joined == [(low, high, True), (low, high, False)]
