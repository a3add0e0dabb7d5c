"""The exact search alone, without heuristics before it, against every order on small lists."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.packing_instances import cut_rectangle
from memopt.solve.pack_check import check_packing
from memopt.solve.pack_problem import Buffer, pieces
from memopt.solve.pack_search import FEWEST, FORCED, LOWEST, NEARLY_FORCED, Outcome, Search, ranking
from tests.solve.packings import crowded_lists, least_size


@pytest.mark.parametrize("few", [LOWEST, FORCED, NEARLY_FORCED, FEWEST])
@settings(max_examples=60, deadline=None, derandomize=True)
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


@settings(max_examples=100, deadline=None, derandomize=True)
@given(buffers=crowded_lists(alignments=(1, 2, 4, 6)))
def test_no_size_between_is_skipped_and_bounds_hold(buffers):
    for piece in pieces(buffers):
        least = least_size(list(piece.buffers))
        assert piece.lower_bound <= least
        size = piece.lower_bound
        while size < least:
            size = piece.next_size(size)
        assert size == least


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
