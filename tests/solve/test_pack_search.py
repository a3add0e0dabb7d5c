"""The exact search alone, without heuristics before it, against every order on small lists."""

import math
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.packing_instances import cut_rectangle
from memopt.solve import pack_search
from memopt.solve.pack_problem import Buffer, pieces
from memopt.solve.pack_search import FEWEST, FORCED, LOWEST, NEARLY_FORCED, Outcome, Search, ranking
from tests.solve.check_pack import check_packing
from tests.solve.packings import crowded_lists, fits, gapped_lists, least_size


@pytest.mark.parametrize("few", [LOWEST, FORCED, NEARLY_FORCED, FEWEST])
@settings(max_examples=60)
@given(buffers=crowded_lists(alignments=(1, 2, 4, 6)), letters=st.sampled_from(["TAW", "WAT"]), seed=st.integers(0, 9))
def test_every_capacity_is_met_or_refuted(few, buffers, letters, seed):
    for piece in pieces(buffers):
        least = least_size(list(piece.buffers))
        search = Search(piece)
        ranks = ranking(piece, letters, 0.5, seed)
        # From above and from below: what is remembered of one capacity must not harm another.
        for capacity in (*range(least + 3, least - 4, -1), least, least + 1):
            outcome = search.run(capacity, ranks, few, 100_000, math.inf)
            assert outcome is (Outcome.FOUND if capacity >= least else Outcome.IMPOSSIBLE)
            if outcome is Outcome.FOUND:
                offsets = [offset * piece.unit for offset in search.offsets]
                check_packing(piece.buffers, offsets, piece.size(search.offsets), capacity)


@pytest.mark.parametrize("few", [LOWEST, FORCED, NEARLY_FORCED, FEWEST])
@settings(max_examples=60)
@given(buffers=gapped_lists(), letters=st.sampled_from(["TAW", "WAT"]), seed=st.integers(0, 9))
def test_the_fullest_moment_may_not_be_enough(few, buffers, letters, seed):
    for piece in pieces(buffers):
        search, ranks = Search(piece), ranking(piece, letters, 0.5, seed)
        for capacity in (piece.lower_bound, piece.lower_bound + 1, piece.lower_bound):
            outcome = search.run(capacity, ranks, few, 100_000, math.inf)
            assert outcome is (Outcome.FOUND if fits(list(piece.buffers), capacity) else Outcome.IMPOSSIBLE)


@pytest.mark.parametrize("few", [LOWEST, FORCED, NEARLY_FORCED, FEWEST])
@settings(max_examples=15)
@given(count=st.integers(40, 80), seed=st.integers(0, 999), shorten=st.sampled_from([0.0, 0.3, 0.8]))
def test_what_fits_is_never_refuted(few, count, seed, shorten):
    capacity = 1 << 16
    for piece in pieces(cut_rectangle(count, count, capacity, 1024, seed, shorten=shorten)):
        search = Search(piece)
        for letters in ("TAW", "WAT"):
            outcome = search.run(capacity, ranking(piece, letters, 0.5, seed), few, 400, math.inf)
            assert outcome is not Outcome.IMPOSSIBLE
            if outcome is Outcome.FOUND:
                check_packing(piece.buffers, [piece.unit * o for o in search.offsets], piece.size(search.offsets))


@settings(max_examples=100)
@given(buffers=crowded_lists(alignments=(1, 2, 4, 6)))
def test_no_size_between_is_skipped_and_bounds_hold(buffers):
    for piece in pieces(buffers):
        least = least_size(list(piece.buffers))
        assert piece.lower_bound <= least
        size = piece.lower_bound
        while size < least:
            size = piece.next_size(size)
        assert size == least


@pytest.mark.parametrize("few", [LOWEST, FEWEST])
@settings(max_examples=60)
@given(buffers=st.one_of(crowded_lists(most=8), gapped_lists()))
def test_weaker_bounds_change_nothing_but_the_time(few, buffers):
    for piece in pieces(buffers):
        search, weaker, ranks = Search(piece), Search(piece), ranking(piece, "TAW")
        for capacity in range(piece.lower_bound - 1, piece.lower_bound + 4):
            outcome = search.run(capacity, ranks, few, 100_000, math.inf)
            with mock.patch.object(pack_search, "_ROUNDS", 0):
                assert weaker.run(capacity, ranks, few, 100_000, math.inf) is outcome


def test_the_limit_stops_it_and_a_higher_one_goes_on():
    (piece,) = pieces(cut_rectangle(60, 120, 1 << 20, 1024, 2))
    search = Search(piece)
    ranks = ranking(piece, "TAW")
    assert search.run(1 << 20, ranks, LOWEST, 10, math.inf) is Outcome.STOPPED
    assert search.nodes == 11
    assert search.run(1 << 20, ranks, FEWEST, 100_000, math.inf) is Outcome.FOUND
    assert search.run(1 << 20, ranks, FEWEST, 100_000, 0.0) is Outcome.STOPPED


def test_ranks_follow_the_letters_and_noise_is_repeatable():
    (piece,) = pieces([Buffer(0, 4, 3), Buffer(1, 3, 8), Buffer(3, 9, 1)])
    assert ranking(piece, "W") == [1, 2, 0]
    assert ranking(piece, "A") == [1, 0, 2]
    assert ranking(piece, "TA") == [1, 0, 2]
    assert ranking(piece, "A", 0.5, 3) == ranking(piece, "A", 0.5, 3)
    assert len({tuple(ranking(piece, "A", 0.9, seed)) for seed in range(40)}) > 1


@pytest.mark.parametrize(
    ("buffers", "unit", "alignments"),
    [
        ([(0, 2, 3000), (1, 3, 2000)], 1000, (1, 1)),
        ([(0, 2, 3000), (1, 3, 2000, 8)], 1000, (1, 1)),
        ([(0, 2, 192, 64), (1, 3, 128, 128)], 64, (1, 2)),
        ([(0, 2, 12, 4), (1, 3, 18, 6)], 2, (2, 3)),
    ],
)
def test_the_unit_is_as_large_as_rooms_and_alignments_allow(buffers, unit, alignments):
    (piece,) = pieces([Buffer(*buffer) for buffer in buffers])
    assert (piece.unit, piece.alignments) == (unit, alignments)
