"""A best-fit allocator is led to where blocks were packed, over random programs."""

import dataclasses
import random

import pytest

from memopt.solve.placement import SMALL, Block, place
from memopt.solve.steering import Misplaced, Steering

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
