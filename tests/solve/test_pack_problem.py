"""Buffers scaled, cut into pieces and bounded; what makes no sense is refused."""

import pytest

from memopt.solve.pack_problem import Buffer, pieces, refuse_malformed


def only(*buffers):
    (piece,) = pieces([Buffer(*buffer) for buffer in buffers])
    return piece


@pytest.mark.parametrize(
    ("buffer", "error", "message"),
    [
        ((0, 1, 2.0), TypeError, "buffer 0: size must be an int, not 2.0"),
        ((True, 1, 2), TypeError, "lower must be an int"),
        ((2, 1, 2), ValueError, "upper 1 is before lower 2"),
        ((0, 1, -1), ValueError, "size -1 is negative"),
        ((0, 1, 1, 0), ValueError, "alignment 0 is below 1"),
        ((0, 1, 1 << 61), ValueError, "add up to more than"),
    ],
)
def test_what_makes_no_sense_is_refused(buffer, error, message):
    with pytest.raises(error, match=message):
        refuse_malformed([Buffer(*buffer)])


def test_lives_that_never_meet_are_apart_and_what_is_never_live_is_left_out():
    found = pieces([Buffer(5, 7, 1), Buffer(0, 2, 1), Buffer(1, 3, 1), Buffer(4, 4, 9), Buffer(0, 9, 0)])
    assert [piece.members for piece in found] == [(1, 2), (0,)]


def test_one_ends_where_the_next_begins_and_they_do_not_meet():
    assert len(pieces([Buffer(0, 2, 1), Buffer(2, 3, 1)])) == 2


def test_sections_are_the_largest_sets_alive_at_once():
    piece = only((0, 2, 1), (1, 4, 1), (3, 5, 1))
    assert piece.sections == ((0, 1), (1, 2))
    assert (piece.first, piece.last) == ((0, 0, 1), (1, 2, 2))
    assert piece.neighbours == ((1,), (0, 2), (1,)) and piece.meetings == 2


def test_sizes_are_counted_in_the_largest_common_unit():
    piece = only((0, 2, 96), (1, 3, 64))
    assert (piece.unit, piece.rooms, piece.loads, piece.lower_bound) == (32, (3, 2), (5,), 160)
    assert piece.size([0, 3]) == 160 and piece.next_size(160) == 192


def test_an_alignment_takes_room_below_others_but_not_at_the_top():
    piece = only((0, 2, 5, 8), (0, 2, 5, 8))
    assert piece.unit == 8 and piece.rooms == (1, 1)
    assert piece.lower_bound == 8 + 5


def test_equal_buffers_are_twins():
    assert only((0, 2, 4), (0, 2, 4), (0, 2, 5)).twins == ((1,), (0,), ())
