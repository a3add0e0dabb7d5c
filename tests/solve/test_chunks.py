"""Stretches in chunks: the best of all that there are on small problems, and a checker that objects to others."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.solve import chunks
from memopt.solve.chunks import Chunking, ChunkProblem, ChunkSearch, Storage, Stretch, Value, live_bytes
from tests.solve.check_chunks import ChunkingError, check_chunks


@st.composite
def problems(draw) -> ChunkProblem:
    steps = draw(st.integers(1, 6))
    storages, values = [], []
    for step in range(steps):
        last = draw(st.integers(step, steps))
        size = draw(st.integers(0, 20))
        divides = draw(st.booleans())
        storages.append(Storage(step, last + 1, size, divides))
        if divides:
            values.append(Value(step, last, size))
    return ChunkProblem(
        samples=draw(st.sampled_from([4, 5])),
        storages=tuple(storages),
        values=tuple(values),
        workspace=tuple(draw(st.integers(0, 3)) for _ in range(steps)),
        seconds=tuple(draw(st.sampled_from([0.5, 2.0, 9.0])) for _ in range(steps)),
        free=tuple(draw(st.integers(0, 5)) > 0 for _ in range(steps)),
        places=(True, *(draw(st.integers(0, 3)) > 0 for _ in range(steps - 1)), True),
        counts=draw(st.sampled_from([(2, 4), (4,), ()])),
        least_seconds=0.5,
        call_seconds=0.25,
        byte_seconds=0.125,
    )


def peak_of(problem: ChunkProblem, stretches: tuple[Stretch, ...]) -> int:
    """The peak as the checker sees it."""
    try:
        check_chunks(problem, Chunking(stretches, -1, 0.0))
    except ChunkingError as error:
        return int(str(error).split()[3]) if "the peak is" in str(error) else -1
    raise AssertionError


def everything(problem: ChunkProblem):
    """Every set of stretches, with its peak and its time."""
    steps = len(problem.free)
    single = [
        Stretch(start, stop, count)
        for start, stop in itertools.combinations(range(steps + 1), 2)
        for count in problem.counts
    ]
    for number in range(3):
        for found in itertools.combinations(single, number):
            peak = peak_of(problem, found)
            if peak >= 0:
                extra = sum(problem.extra(step, s.chunks) for s in found for step in range(s.start, s.stop))
                joined = sum(v.size for s in found for v in problem.values if s.start <= v.made < s.stop <= v.last)
                yield peak, extra + problem.byte_seconds * joined


@settings(max_examples=60)
@given(problems(), st.integers(0, 60))
def test_no_stretches_keep_a_smaller_limit_or_add_less_time(problem, limit):
    search, best = ChunkSearch(problem), list(everything(problem))
    least = search.minimum_bytes()
    assert least <= min(peak for peak, _ in best)  # three stretches are not among them
    found = search.within(least)
    assert found is not None and found.peak_bytes == least
    check_chunks(problem, found)
    assert search.within(least - 1) is None
    found = search.within(limit)
    assert (found is None) == (limit < least)
    if found is not None:
        check_chunks(problem, found)
        assert found.peak_bytes <= limit
        within = [seconds for peak, seconds in best if peak <= limit]
        assert not within or found.extra_seconds <= min(within) + 1e-9


def chain(sizes: list[int], samples: int = 8) -> ChunkProblem:
    """Steps that each read what the one before made."""
    steps = len(sizes)
    return ChunkProblem(
        samples=samples,
        storages=tuple(Storage(k, k + 2, size) for k, size in enumerate(sizes)),
        values=tuple(Value(k, k + 1, size) for k, size in enumerate(sizes)),
        workspace=(0,) * steps,
        seconds=(1.0,) * steps,
        free=(True,) * steps,
        places=(True,) * (steps + 1),
        counts=(2, 4, 8),
        call_seconds=1.0,
    )


def test_the_wide_beginning_of_a_chain_runs_in_chunks_and_the_rest_whole():
    problem = chain([64, 64, 64, 8, 8, 8, 8, 8])
    assert max(live_bytes(problem)) == 128
    search = ChunkSearch(problem)
    found = search.within(40)
    assert found is not None and found.stretches == (Stretch(0, 4, 4),)
    assert found.peak_bytes == 40 and found.extra_seconds == 12.0
    assert search.within(128) == Chunking((), 128, 0.0)


def test_two_wide_places_become_two_stretches():
    found = ChunkSearch(chain([64, 64, 4, 4, 4, 4, 64, 64, 4])).within(40)
    assert found is not None
    assert [(s.start, s.stop) for s in found.stretches] == [(0, 3), (6, 9)]


def test_a_step_that_may_not_be_divided_ends_a_stretch():
    problem = chain([64, 64, 8, 8])
    blocked = dataclasses.replace(problem, free=(True, False, True, True))
    assert ChunkSearch(blocked).minimum_bytes() == 128 > ChunkSearch(problem).minimum_bytes()
    assert ChunkSearch(blocked).within(100) is None


def test_without_steps_there_is_nothing_to_do():
    problem = ChunkProblem(2, (), (), (), (), (), (True,), (2,))
    assert ChunkSearch(problem).within(0) == Chunking((), 0, 0.0)


def test_of_many_places_those_with_least_alive_are_looked_at(monkeypatch):
    problem = chain([64, 64, 8, 8] * 8)
    full = ChunkSearch(problem).within(72)
    monkeypatch.setattr(chunks, "_PLACES", 8)
    few = ChunkSearch(problem).within(72)
    assert full is not None and few is not None
    check_chunks(problem, few)
    assert full.extra_seconds <= few.extra_seconds <= 1.5 * full.extra_seconds


@pytest.mark.parametrize(
    ("stretches", "reason"),
    [
        ((Stretch(2, 1, 2),), "out of order"),
        ((Stretch(0, 2, 2), Stretch(1, 3, 2)), "out of order"),
        ((Stretch(0, 2, 3),), "no choice"),
        ((Stretch(0, 4, 2),), "may not run"),
        ((Stretch(0, 2, 2),), "the peak is"),
    ],
)
def test_the_checker_objects(stretches, reason):
    problem = dataclasses.replace(chain([64, 64, 8, 8]), free=(True, True, True, False))
    with pytest.raises(ChunkingError, match=reason):
        check_chunks(problem, Chunking(stretches, 1, 0.0))
    found = ChunkSearch(problem).within(80)
    assert found is not None
    with pytest.raises(ChunkingError, match="seconds are added"):
        check_chunks(problem, dataclasses.replace(found, extra_seconds=99.0))
