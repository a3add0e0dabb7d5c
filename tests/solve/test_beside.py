"""The trade-off of a graph beside others: valid plans, none worse than another in all, and some that save less."""

import itertools

import pytest

from memopt.solve.beside import curve_beside
from memopt.solve.check import check
from memopt.solve.phase_peaks import phase_peaks
from memopt.solve.problem import StepProblem
from memopt.solve.recompute import curve
from tests.solve.problems import chain, skips


def block() -> StepProblem:
    """Of an input a value that costs much memory to make, and is read once; and one that is cheap to keep.

    Backward peaks where the dear value's own gradient is made: keeping the other one beside costs no higher peak.
    """
    return StepProblem(
        sizes=(10, 4, 4, 1, 1, 30, 4, 4),
        reads=((0,), (1,), (2,), (3, 4), (4, 2), (5, 1), (6, 0)),
        writes=((1,), (2,), (3,), (5,), (6,), (7,), ()),
        costs=(1.0,) * 7,
        workspace=(0,) * 7,
        forward=3,
        recomputable=(True,) * 3 + (False,) * 4,
        pinned=frozenset({3, 7}),
        resident=frozenset({0}),
        arriving=frozenset({4}),
    )


@pytest.mark.parametrize(
    "problem", [chain(8), chain(12, 3), skips(6, 1), block()], ids=["chain", "large", "skips", "block"]
)
def test_every_plan_can_run_and_is_better_than_another_in_something(problem):
    found = curve_beside(problem, seconds=1.0)
    taken = []
    for point, phases in zip(found.points, found.peaks, strict=True):
        check(problem, point.schedule, point.peak_bytes)
        assert phases == phase_peaks(problem, point.schedule)
        assert point.minimum_bytes == found.minimum_bytes <= point.peak_bytes
        taken.append((point.seconds, phases.forward, phases.backward, phases.saved))
    assert [item[0] for item in taken] == sorted(item[0] for item in taken)
    for one, other in itertools.permutations(taken, 2):
        assert any(a < b for a, b in zip(one, other, strict=True)), f"{one} is no better than {other}"


def test_a_plan_that_saves_nothing_is_found_though_it_lowers_no_peak():
    problem = block()
    alone = [phase_peaks(problem, point.schedule) for point in curve(problem, seconds=1.0).points]
    beside = curve_beside(problem, seconds=1.0).peaks
    assert min(item.saved for item in beside) == 1 < min(item.saved for item in alone)
    assert min(item.backward for item in beside) == min(item.backward for item in alone)


def test_a_graph_without_a_phase_has_its_own_curve():
    problem = chain(4)
    forward = StepProblem(
        sizes=problem.sizes[:3], reads=((), (0,), (1,)), writes=((0,), (1,), (2,)), costs=(1.0,) * 3,
        workspace=(0,) * 3, forward=3, recomputable=(True,) * 3, pinned=frozenset({2}),
    )  # fmt: skip
    assert len(curve_beside(forward, seconds=0.2).points) == 1
