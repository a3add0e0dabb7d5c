"""Blocks that a best-fit allocator is led to put where they were packed."""

from __future__ import annotations

import dataclasses
import random

import pytest

from memopt.solve import placement
from memopt.solve.placement import (
    SMALL,
    UNITS,
    Block,
    Misplaced,
    Placement,
    Placements,
    Steering,
    _mistaken,
    _room,
    _whole,
    most_bytes,
    place,
)

MIB = 2**20


class Heap:
    """A best-fit allocator: the smallest free block that fits, the lowest of equal ones, cut where enough is left."""

    def __init__(self, size):
        self.free, self.taken, self.small = {0: size}, {}, 0

    def take(self, size):
        size = -(-size // 512) * 512
        if size <= SMALL:
            self.small -= 1
            self.taken[self.small] = size
            return self.small
        fitting = [(length, start) for start, length in self.free.items() if length >= size]
        if not fitting:
            raise MemoryError
        length, start = min(fitting)
        del self.free[start]
        if length - size > SMALL:
            self.free[start + size] = length - size
            length = size
        self.taken[start] = length
        return start

    def give(self, start):
        size = self.taken.pop(start)
        if start < 0:
            return
        for other, length in list(self.free.items()):
            if other + length == start:
                del self.free[other]
                start, size = other, size + length
            elif start + size == other:
                del self.free[other]
                size += length
        self.free[start] = size


def told(blocks, early=lambda index: index % 2):
    """The same blocks, where it is known which of those that die in their line are let go of at once."""
    return [
        dataclasses.replace(block, until=index + 1 if block.dies == block.born and early(index) else -1)
        for index, block in enumerate(blocks)
    ]


def run(blocks, memory, steering=None, early=lambda index: index % 2):
    """Ask for the blocks of a program, line by line; return their addresses."""
    addresses = {}
    for line in range(1 + max(block.dies for block in blocks)):
        born = [index for index, block in enumerate(blocks) if block.born == line]
        if steering is not None and any(blocks[index].size > SMALL for index in born):
            steering.before(line)
        for index in born:
            addresses[index] = memory.take(blocks[index].size)
            if blocks[index].dies == line and early(index):  # at once, or when the line has ended
                memory.give(addresses[index])
        for index, block in enumerate(blocks):
            if block.dies == line and not (block.born == line and early(index)):
                memory.give(addresses[index])
    return [addresses[index] for index in range(len(blocks))]


def programs(seed, lines=40):
    """Blocks of one line each have another size, most of the time."""
    draw = random.Random(seed)
    sizes = [draw.choice((1, 2, 3, 8, 16, 64)) * MIB + draw.choice((0, 0, 512, 700 * 1024)) for _ in range(6)]
    blocks = []
    for line in range(lines):
        for size in draw.sample(sizes, draw.choice((0, 1, 1, 2, 3))):
            blocks.append(Block(size, line, min(lines, line + draw.choice((0, 1, 1, 2, 9, 30)))))
    return [*blocks, Block(4 * MIB, lines, lines)]


@pytest.mark.parametrize("seed", range(60))
def test_every_block_lies_where_it_was_packed(seed):
    blocks = told(programs(seed))
    placement = place(blocks, timeout=0.5)
    assert placement is not None
    heap = Heap(placement.arena_bytes)
    steering = Steering(placement, heap)
    for _ in range(2):  # a step, and another one
        steering.begin()
        addresses = run(blocks, heap, steering)
        steering.end()
        for block, address, offset in zip(blocks, addresses, placement.offsets, strict=True):
            assert (address == offset or block.dies == block.born) if offset >= 0 else address < 0
        assert heap.free == {0: placement.arena_bytes} and not heap.taken


def calls(seed, lines=40):
    """Lines that ask for results, and before each for a workspace that dies in the line, often of equal sizes."""
    draw = random.Random(seed)
    sizes = [draw.randint(2049, 40 * 2049) * 512 for _ in range(3)]
    blocks = []
    for line in range(lines):
        for _ in range(draw.choice((0, 1, 1, 2))):
            blocks.append(Block(draw.choice(sizes), line, line))
            blocks.append(Block(draw.choice(sizes), line, min(lines, line + draw.choice((1, 2, 9, 30)))))
    return [*blocks, Block(4 * MIB, lines, lines)]


@pytest.mark.parametrize("early", [lambda index: True, lambda index: False, lambda index: index % 3])
@pytest.mark.parametrize("seed", range(20))
def test_workspaces_take_no_result_s_place(seed, early):
    blocks = told(calls(seed), early)
    placement = place(blocks, timeout=0.5)
    heap = Heap(placement.arena_bytes)
    steering = Steering(placement, heap)
    steering.begin()
    addresses = run(blocks, heap, steering, early)
    steering.end()
    for block, address, offset in zip(blocks, addresses, placement.offsets, strict=True):
        assert address == offset or block.dies == block.born
    assert heap.free == {0: placement.arena_bytes} and not heap.taken


def test_best_fit_alone_takes_more():
    """A block that stays splits the memory of two that came before it."""
    blocks = [Block(8 * MIB, 0, 1), Block(2 * MIB, 1, 4), Block(4 * MIB, 2, 4), Block(10 * MIB, 3, 3)]
    placement = place(blocks)
    assert placement.arena_bytes == 18 * MIB  # 16 are in use at once
    with pytest.raises(MemoryError):
        run(blocks, Heap(18 * MIB))
    heap = Heap(18 * MIB)
    steering = Steering(placement, heap)
    steering.begin()
    run(blocks, heap, steering)
    steering.end()
    assert heap.free == {0: 18 * MIB}


def test_requests_of_one_line_that_would_be_mistaken_are_not_placed():
    blocks, holes = (Block(8 * MIB, 0, 1), Block(8 * MIB, 0, 2)), (8 * MIB, 8 * MIB)
    assert _mistaken(Placement(blocks, (8 * MIB, 0), holes, 16 * MIB, MIB)) == [[0, 1]]
    assert _mistaken(Placement(blocks, (0, 8 * MIB), holes, 16 * MIB, MIB)) == []


def test_a_program_that_asks_for_something_else_is_noticed_and_all_is_free():
    blocks = [Block(8 * MIB, 0, 1), Block(4 * MIB, 1, 3), Block(8 * MIB, 2, 3)]
    heap = Heap(64 * MIB)
    steering = Steering(place(blocks), heap)
    steering.begin()
    steering.before(0)
    first = heap.take(6 * MIB)  # smaller than was known
    with pytest.raises(Misplaced):
        steering.before(1)
        heap.give(first)
        steering.before(2)
    held = [size for start, size in heap.taken.items() if start >= 0]
    assert sum(held) <= 6 * MIB


def test_sizes_leave_nothing_that_cannot_be_held():
    for unit in (UNITS[0], UNITS[1], 3 * MIB // 2, UNITS[-1]):
        for size in (unit, unit + 512, 2 * unit - 512, 2 * unit, 3 * unit - SMALL, 3 * unit - SMALL - 512):
            left = _room(size, unit) - size
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
