"""Heuristics by hand, and that they give packings."""

import math

from hypothesis import given, settings

from benchmarks.packing_instances import cut_rectangle
from memopt.solve.pack_greedy import Greedy, best_of_orders, by_size
from memopt.solve.pack_problem import Buffer, pieces
from tests.solve.check_pack import check_packing
from tests.solve.packings import crowded_lists, least_size

# Over the gap of 6 between the first two lie 4 bytes at most; over the one of 3 above them, 3.
GAPS = [Buffer(0, 4, 2), Buffer(0, 2, 6), Buffer(0, 4, 2), Buffer(0, 2, 3), Buffer(0, 4, 1), Buffer(2, 4, 3)]


def test_by_hand_the_lowest_gap_and_the_tightest():
    (piece,) = pieces(GAPS)
    greedy = Greedy(piece)
    # 0..2, 2..8, 8..10, 10..13, 13..14 in the order given; what lives later fits in both gaps.
    assert greedy.place(range(6)) == 14
    assert greedy.offsets == [0, 2, 8, 10, 13, 2]
    tight = Greedy(piece)
    assert tight.place(range(6), tightest=True) == 14
    assert tight.offsets == [0, 2, 8, 10, 13, 10]


def test_the_best_is_kept():
    (piece,) = pieces([Buffer(0, 2, 4), Buffer(1, 4, 4), Buffer(3, 6, 4, 8)])
    greedy = Greedy(piece)
    assert greedy.place([0, 1, 2]) == 8
    offsets = list(greedy.offsets)
    assert greedy.place([1, 2, 0]) == 12
    assert (greedy.size, greedy.offsets) == (8, offsets)


def test_climbing_repairs_an_order():
    (piece,) = pieces(cut_rectangle(20, 40, 1 << 20, 1024, 2))
    greedy = Greedy(piece)
    order = sorted(range(20), key=lambda buffer: piece.rooms[buffer])
    plain = greedy.place(order)
    greedy.climb(order, piece.lower_bound, math.inf)
    assert piece.lower_bound <= greedy.size < plain


@settings(max_examples=150)
@given(buffers=crowded_lists(alignments=(1, 2, 4, 6)))
def test_what_heuristics_give_are_packings(buffers):
    for piece in pieces(buffers):
        greedy = best_of_orders(piece, piece.lower_bound, math.inf)
        check_packing(piece.buffers, [offset * piece.unit for offset in greedy.offsets], greedy.size)
        assert least_size(list(piece.buffers)) <= greedy.size <= by_size(piece)


def test_past_the_deadline_one_order_is_still_tried():
    (piece,) = pieces(GAPS)
    assert best_of_orders(piece, 0, 0.0).size == by_size(piece)
