"""Where blocks are packed, for how long, and when again."""

from __future__ import annotations

import dataclasses

from memopt.solve import placement
from memopt.solve.placement import (
    SMALL,
    UNITS,
    Block,
    Placement,
    Placements,
    _mistaken,
    _whole,
    most_bytes,
    place,
    room_of,
)

MIB = 2**20


def test_requests_of_one_line_that_would_be_mistaken_are_not_placed():
    blocks, holes = (Block(8 * MIB, 0, 1), Block(8 * MIB, 0, 2)), (8 * MIB, 8 * MIB)
    assert _mistaken(Placement(blocks, (8 * MIB, 0), holes, 16 * MIB, MIB)) == [[0, 1]]
    assert _mistaken(Placement(blocks, (0, 8 * MIB), holes, 16 * MIB, MIB)) == []


def test_sizes_leave_nothing_that_cannot_be_held():
    for unit in (UNITS[0], UNITS[1], 3 * MIB // 2, UNITS[-1]):
        for size in (unit, unit + 512, 2 * unit - 512, 2 * unit, 3 * unit - SMALL, 3 * unit - SMALL - 512):
            left = room_of(size, unit) - size
            assert left == 0 or left > SMALL
            assert _whole(size, unit) - size <= SMALL


def test_little_is_lost_where_blocks_are_of_odd_sizes():
    sizes = [49 * MIB, 49 * MIB // 2, 49 * MIB // 4, 49 * MIB // 8]
    blocks = [Block(size, index, 99) for index, size in enumerate(sizes * 8)]
    used = sum(block.size for block in blocks)
    assert most_bytes([*blocks, Block(SMALL, 0, 99), Block(9 * MIB, 100, 101)]) == used
    assert used < place(blocks, timeout=0.2).arena_bytes < 1.01 * used


def test_what_is_not_packed_closely_is_packed_for_longer_and_with_another_unit(monkeypatch):
    blocks = [Block(30 * MIB, 0, 2), Block(50 * MIB, 1, 3)]
    asked, placed = [], placement._placed

    def loose(blocks, unit, timeout):
        asked.append((unit, timeout))
        found = placed(blocks, unit, timeout)
        return None if len(asked) == 1 else dataclasses.replace(found, arena_bytes=found.arena_bytes * (5 - len(asked)))

    monkeypatch.setattr(placement, "_placed", loose)
    found = place(blocks, timeout=0.5)
    (first, shortly), (again, longer), (other, _) = asked
    assert first == again != other and (shortly, longer) == (0.5, 2.0)
    assert found.unit == other, "the smallest of them"
    asked.clear()
    monkeypatch.setattr(placement, "_placed", lambda *given: asked.append(given) or placed(*given))
    assert place(blocks) is not None and len(asked) == 1


def test_the_same_blocks_are_packed_again_only_where_that_may_help(monkeypatch):
    asked, sizes = [], {}

    def place(blocks, room):
        asked.append(room)
        size = sizes[room]
        return None if size is None else Placement(tuple(blocks), (), (), size, 1)

    monkeypatch.setattr(placement, "place", place)
    known, blocks = Placements(), [Block(30 * MIB, 0, 2), Block(50 * MIB, 1, 3)]

    def asks(room, size, blocks=blocks):
        asked.clear()
        sizes[room] = size
        found = known.place(blocks, room)
        return None if found is None else found.arena_bytes, list(asked)

    assert asks(200, 150) == (150, [200])
    assert asks(160, 155) == (150, []), "it has room"
    assert asks(140, 145) == (145, [140]), "the first that had room was taken, and no less was looked for"
    assert asks(120, 110) == (145, []) == asks(144, 110), "all of it was in vain"
    assert asks(145, 110) == (145, [])
    assert asks(100, None, blocks[:1]) == (None, [100])
    assert asks(200, 90, blocks[:1]) == (None, []), "they cannot be led"
    for number in range(5):
        assert asks(10, 5, [Block(number + 1, 0, 1)]) == (5, [10])
    assert asks(200, 150) == (150, [200]), "forgotten"


def test_an_arena_that_fits_into_the_room_there_is_will_do(monkeypatch):
    asked, placed = [], placement._placed

    def loose(blocks, unit, timeout, capacity=None):
        asked.append(capacity)
        found = placed(blocks, unit, timeout, capacity)
        return dataclasses.replace(found, arena_bytes=2 * found.arena_bytes)

    monkeypatch.setattr(placement, "_placed", loose)
    blocks = [Block(30 * MIB, 0, 2), Block(50 * MIB, 1, 3)]
    found = place(blocks, timeout=0.5, room=200 * MIB)
    assert found.arena_bytes <= 200 * MIB and len(asked) == 1 and 0 < asked[0] < 200 * MIB
    asked.clear()
    found = place(blocks, timeout=0.5, room=100 * MIB)
    assert found.arena_bytes > 100 * MIB and len(asked) == 3 and not any(asked[1:])
    assert place([], room=0) is not None
