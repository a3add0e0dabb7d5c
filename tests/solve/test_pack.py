"""Packings against every order on small lists, their bounds, and what comes in malformed."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.packing_instances import cut_rectangle
from memopt.solve.pack import Buffer, Packing, pack
from memopt.solve.pack_greedy import by_size
from memopt.solve.pack_problem import pieces
from tests.solve.check_pack import check_packing
from tests.solve.packings import GAPPED, buffer_lists, fits, least_size

EXAMPLE = [Buffer(0, 3, 4), Buffer(3, 9, 4), Buffer(0, 9, 4), Buffer(9, 21, 4), Buffer(0, 21, 4)]
# By hand: the three long ones meet two by two, so that 2 + 2 of the first moment cannot both lie beneath 3.
TIGHT = [Buffer(0, 2, 2), Buffer(1, 4, 2), Buffer(3, 6, 3), Buffer(0, 6, 1), Buffer(5, 8, 4)]


@settings(max_examples=300)
@given(buffers=buffer_lists())
def test_small_lists_are_packed_in_the_least_size_and_proved(buffers):
    packing = pack(buffers)
    check_packing(buffers, packing.offsets, packing.size)
    assert packing == Packing(packing.offsets, least_size(buffers), packing.size, True)


@settings(max_examples=200)
@given(buffers=buffer_lists(alignments=(1, 2, 3, 4, 8)))
def test_alignment_is_kept_at_the_least_cost(buffers):
    packing = pack(buffers)
    check_packing(buffers, packing.offsets, packing.size)
    assert packing.size == packing.lower_bound == least_size(buffers)


@settings(max_examples=200)
@given(buffers=buffer_lists(alignments=(1, 4)), change=st.integers(-3, 3))
def test_a_capacity_is_met_or_refuted(buffers, change):
    least = least_size(buffers)
    packing = pack(buffers, capacity=max(0, least + change))
    check_packing(buffers, packing.offsets, packing.size)
    assert packing.lower_bound <= least <= packing.size
    if change < 0 < least:
        assert packing.lower_bound > least + change
        assert not packing.size <= least + change
    else:
        assert packing.size <= least + max(0, change)
    assert packing.optimal == (packing.size == packing.lower_bound)


def test_the_published_example_is_packed_at_its_capacity():
    packing = pack(EXAMPLE, capacity=12)
    check_packing(EXAMPLE, packing.offsets, 12, 12)
    assert packing.optimal
    refuted = pack(EXAMPLE, capacity=11)
    assert (refuted.size, refuted.lower_bound) == (12, 12)


def test_nothing_empty_and_never_live_take_no_room_from_others():
    assert pack([]) == Packing((), 0, 0, True)
    buffers = [Buffer(0, 5, 8), Buffer(2, 3, 0), Buffer(4, 4, 6), Buffer(0, 9, 0, 64)]
    assert pack(buffers) == Packing((0, 0, 0, 0), 8, 8, True)
    # Never live, yet its bytes are in the arena.
    assert pack([Buffer(0, 5, 8), Buffer(7, 7, 20)]) == Packing((0, 0), 20, 20, True)


def test_lives_are_half_open():
    assert pack([Buffer(0, 3, 5), Buffer(3, 6, 5)]).size == 5
    assert pack([Buffer(0, 4, 5), Buffer(3, 6, 5)]).size == 10


def test_plain_tuples_do():
    assert pack([(0, 3, 5), (1, 2, 3, 4)]) == pack([Buffer(0, 3, 5), Buffer(1, 2, 3, 4)])


def test_pieces_of_time_are_packed_apart_and_the_largest_counts():
    buffers = TIGHT + [Buffer(10 + b.lower, 10 + b.upper, 2 * b.size) for b in TIGHT]
    packing = pack(buffers)
    check_packing(buffers, packing.offsets, packing.size)
    assert packing.size == packing.lower_bound == 2 * least_size(TIGHT)


def test_the_last_buffer_of_a_stack_need_not_be_padded():
    buffers = [Buffer(0, 2, 5, 4), Buffer(0, 2, 3, 4), Buffer(0, 2, 6, 4)]
    packing = pack(buffers)
    check_packing(buffers, packing.offsets, packing.size)
    assert packing.size == packing.lower_bound == 4 + 8 + 5 == least_size(buffers)


@pytest.mark.parametrize(("count", "seed"), [(20, 2), (60, 1), (60, 2), (120, 2)])
def test_cut_rectangles_are_put_together_again(count, seed):
    buffers = cut_rectangle(count, 2 * count, 1 << 20, 1024, seed)
    packing = pack(buffers, timeout=300)
    check_packing(buffers, packing.offsets, 1 << 20)
    assert packing.optimal
    (piece,) = pieces(buffers)
    assert by_size(piece) > 1.05 * (1 << 20)


@pytest.mark.parametrize(("buffers", "least"), [*zip(GAPPED, (6, 5, 7), strict=True)])
def test_more_than_the_fullest_moment_is_proved_to_be_needed(buffers, least):
    assert not fits(buffers, least - 1)
    packing = pack(buffers)
    check_packing(buffers, packing.offsets, least)
    assert packing.optimal
    # In units of 1,000 bytes: the next size above the refuted one is a whole unit on.
    thousands = [buffer._replace(size=1000 * buffer.size) for buffer in buffers]
    refuted = pack(thousands, capacity=1000 * (least - 1))
    assert refuted.lower_bound == 1000 * least


def test_a_search_that_stopped_proves_nothing(monkeypatch):
    monkeypatch.setattr("memopt.solve.pack._NODES", 1)
    monkeypatch.setattr("memopt.solve.pack._NODES_EACH", 0)
    buffers = cut_rectangle(60, 120, 1 << 20, 1024, 1)
    packing = pack(buffers, timeout=300)
    check_packing(buffers, packing.offsets, packing.size)
    assert packing.lower_bound == 1 << 20


def test_the_same_list_is_packed_the_same():
    buffers = cut_rectangle(40, 60, 1 << 20, 1024, 5)
    assert pack(buffers) == pack(buffers)


def test_a_timeout_returns_a_valid_packing_soon():
    buffers = cut_rectangle(400, 800, 1 << 20, 1024, 7)
    started = time.monotonic()
    packing = pack(buffers, timeout=0.05)
    assert time.monotonic() - started < 200
    check_packing(buffers, packing.offsets, packing.size)
    assert packing.lower_bound == 1 << 20


@pytest.mark.parametrize(
    ("buffers", "error", "message"),
    [
        ([Buffer(3, 2, 1)], ValueError, "buffer 0: upper 2 is before lower 3"),
        ([Buffer(0, 2, 1), Buffer(0, 2, -1)], ValueError, "buffer 1: size -1 is negative"),
        ([Buffer(0, 2, 1, 0)], ValueError, "buffer 0: alignment 0 is below 1"),
        ([Buffer(0, 2, 1 << 60)], ValueError, "add up to more than 1152921504606846976 bytes"),
        ([Buffer(0, 2, 1.5)], TypeError, "buffer 0: size must be an int, not 1.5"),
        ([Buffer(0, 2, True)], TypeError, "buffer 0: size must be an int, not True"),
    ],
)
def test_malformed_buffers_are_refused(buffers, error, message):
    with pytest.raises(error, match=message):
        pack(buffers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": -1}, "capacity -1 is negative"),
        ({"timeout": 0}, "more than 0 seconds, not 0"),
        ({"timeout": float("nan")}, "more than 0"),
    ],
)
def test_malformed_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        pack(EXAMPLE, **options)
