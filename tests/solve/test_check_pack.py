"""The judge accepts packings, and names what is wrong with anything else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.solve.check_pack import PackingError, check_packing
from tests.solve.packings import buffer_lists

STACK = [(0, 4, 3), (2, 6, 5), (4, 8, 3, 4)]


@pytest.mark.parametrize(("offsets", "size"), [((0, 3, 8), 11), ((5, 0, 8), 11), ((9, 0, 12), 15)])
def test_packings_are_accepted(offsets, size):
    check_packing(STACK, offsets, size)
    check_packing(STACK, offsets, size, size)


@pytest.mark.parametrize(
    ("offsets", "size", "capacity", "message"),
    [
        ((0, 3), 8, None, "2 offsets for 3 buffers"),
        ((-1, 3, 8), 11, None, "buffer 0 lies at -1"),
        ((0, 3, 9), 12, None, "buffer 2 lies at 9, which is negative or misaligned"),
        ((0, 2, 8), 11, None, "buffers 0 and 1 share bytes at time 2"),
        ((0, 3, 4), 8, None, "buffers 1 and 2 share bytes at time 4"),
        ((6, 3, 8), 11, None, "buffers 0 and 1 share bytes at time 2"),
        ((0, 3, 8), 10, None, "ends at 11 bytes, not at 10"),
        ((0, 3, 8), 12, None, "ends at 11 bytes, not at 12"),
        ((0, 3, 8), 11, 10, "packing of 11 bytes is over the capacity of 10"),
    ],
)
def test_what_is_no_packing_is_refused(offsets, size, capacity, message):
    with pytest.raises(PackingError, match=message):
        check_packing(STACK, offsets, size, capacity)


def test_what_takes_no_room_may_lie_anywhere():
    check_packing([(0, 4, 3), (1, 2, 0), (2, 2, 5)], (0, 1, 0), 5)
    with pytest.raises(PackingError, match="ends at 5 bytes, not at 3"):
        check_packing([(0, 4, 3), (2, 2, 5)], (0, 0), 3)


@settings(max_examples=200)
@given(buffers=buffer_lists(most=5), offsets=st.lists(st.integers(0, 12), min_size=5, max_size=5))
def test_it_agrees_with_marking_every_byte_at_every_moment(buffers, offsets):
    offsets = offsets[: len(buffers)]
    marks = [
        (moment, byte)
        for buffer, offset in zip(buffers, offsets, strict=True)
        for moment in range(buffer.lower, buffer.upper)
        for byte in range(offset, offset + buffer.size)
    ]
    size = max((offset + buffer.size for buffer, offset in zip(buffers, offsets, strict=True)), default=0)
    if len(marks) == len(set(marks)):
        check_packing(buffers, offsets, size)
    else:
        with pytest.raises(PackingError, match="share bytes"):
            check_packing(buffers, offsets, size)
