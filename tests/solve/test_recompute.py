"""Every plan is judged by the independent checker; the curve falls, and a chain is as cheap as theory says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings

from memopt.solve.check import check
from memopt.solve.recompute import curve, plan
from memopt.solve.schedule import simulate
from tests.solve.bound import lower_bound
from tests.solve.problems import chain, step_problems


@settings(max_examples=150)
@given(problem=step_problems())
def test_every_plan_is_accepted_and_the_curve_is_monotone(problem):
    found = curve(problem, seconds=0.05)
    bound = lower_bound(problem)
    for point in found.points:
        check(problem, point.schedule, point.peak_bytes, point.peak_bytes)
        trace = simulate(problem, point.schedule)
        assert (trace.peak_bytes, trace.seconds) == (point.peak_bytes, point.seconds)
        assert point.peak_bytes >= bound and point.feasible
    peaks = [point.peak_bytes for point in found.points]
    times = [point.seconds for point in found.points]
    assert peaks == sorted(set(peaks), reverse=True) and times == sorted(set(times))
    for limit in range(peaks[0] + 2):
        best = found.at(limit)
        assert (best is None) == (limit < found.minimum_bytes)
        assert best is None or best.peak_bytes <= limit


@settings(max_examples=30)
@given(problem=step_problems())
def test_plan_without_limit_is_nearly_free_and_an_impossible_limit_is_reported(problem):
    free = plan(problem, None, seconds=0.05)
    check(problem, free.schedule, free.peak_bytes, None)
    assert free.extra_seconds <= 0.01 * problem.base_seconds
    least = plan(problem, -1, seconds=0.05)
    assert not least.feasible and least.peak_bytes == least.minimum_bytes
    check(problem, least.schedule, least.peak_bytes, None)


@pytest.mark.quick("25", "64")
@pytest.mark.parametrize("layers", [25, 36, 64, 100])
def test_a_chain_needs_twice_its_square_root_for_less_than_one_more_forward(layers):
    problem, limit = chain(layers), 2 * math.isqrt(layers) + 1
    found = plan(problem, limit, seconds=60)
    check(problem, found.schedule, found.peak_bytes, limit)
    assert found.feasible and found.extra_seconds < layers
