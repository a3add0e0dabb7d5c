"""The archive is the Pareto front of all that was offered, in order, after every offer."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.solve.archive import Archive, State
from memopt.solve.rollout import Outcome


def _state(peak: int, seconds: float) -> State:
    nothing = np.zeros(0, dtype=np.int64)
    return State([], [], Outcome([], peak, 0, seconds, nothing, nothing))


def _offer(archive: Archive, *points: tuple[int, float]) -> list[bool]:
    return [archive.offer(_state(*point)) for point in points]


def _points(archive: Archive) -> list[tuple[int, float]]:
    return [(state.peak, state.seconds) for state in archive.states]


def test_a_state_that_is_worse_in_both_numbers_is_refused_and_a_better_one_replaces():
    archive = Archive()
    assert _offer(archive, (10, 5.0), (20, 3.0), (30, 1.0)) == [True, True, True]
    assert _offer(archive, (20, 4.0), (25, 3.0), (31, 1.0), (40, 9.0)) == [False] * 4
    assert _points(archive) == [(10, 5.0), (20, 3.0), (30, 1.0)]
    assert _offer(archive, (15, 2.0)) == [True]  # in place of (20, 3.0)
    assert _points(archive) == [(10, 5.0), (15, 2.0), (30, 1.0)]
    assert _offer(archive, (9, 1.0)) == [True]
    assert _points(archive) == [(9, 1.0)]


def test_the_first_of_two_equals_stays():
    archive, first, second = Archive(), _state(10, 5.0), _state(10, 5.0)
    assert archive.offer(first) and not archive.offer(second)
    assert archive.states[0] is first
    assert _offer(archive, (10, 4.0)) == [True]  # as many bytes, fewer seconds
    assert _points(archive) == [(10, 4.0)]


def test_best_is_the_fastest_within_the_limit():
    archive = Archive()
    assert archive.best(1 << 60) is None
    _offer(archive, (10, 5.0), (20, 3.0))
    assert archive.best(9) is None
    assert [archive.best(limit).seconds for limit in (10, 19, 20, 999)] == [5.0, 5.0, 3.0, 3.0]


@settings(max_examples=300)
@given(points=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=25))
def test_after_every_offer_it_is_the_front_of_all_offers(points):
    archive, best = Archive(), [float("inf")] * 14
    for count, (peak, seconds) in enumerate(points, 1):
        seen = set(points[:count])
        expected = sorted(p for p in seen if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in seen))
        new = points[count - 1] in expected and points[count - 1] not in points[: count - 1]
        assert archive.offer(_state(peak, seconds)) == new
        assert _points(archive) == expected
        for limit, before in enumerate(best):
            found = archive.best(limit)
            best[limit] = found.seconds if found else float("inf")
            assert best[limit] <= before
        assert best == sorted(best, reverse=True)
