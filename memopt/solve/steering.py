"""Leads a caching allocator to put blocks where they were packed (`memopt.solve.placement`).

What is held and let go again is a script of few steps between the lines of a program whose requests are known
beforehand.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Protocol

from memopt.solve.placement import Placement, room_of, runs_of


class Memory(Protocol):
    """An allocator's memory, of which blocks are taken by hand."""

    def take(self, size: int) -> int:
        """Take a block of so many bytes; return its address."""

    def give(self, address: int) -> None:
        """Give a block back."""


class Misplaced(RuntimeError):
    """A block does not lie where it was led: the program asks for other blocks than were known."""


class Steering:
    """Leads an allocator through one run of a program.

    The memory must have no other free block of more than `SMALL` bytes than those that are let go of here.
    """

    def __init__(self, placement: Placement, memory: Memory) -> None:
        """Nothing is held before `begin`."""
        self._placement, self._memory = placement, memory
        self._born: dict[int, list[int]] = {}
        self._dead: dict[int, list[int]] = {}
        for index, block in enumerate(placement.blocks):
            if placement.offsets[index] >= 0:
                self._born.setdefault(block.born, []).append(index)
                self._dead.setdefault(block.dies, []).append(index)
        self._base = 0
        self._line = -1  # the latest
        self._offsets: list[int] = []  # of what is held, in order
        self._sizes: dict[int, int] = {}

    def begin(self) -> None:
        """Take the arena."""
        self._base, self._line = self._memory.take(self._placement.arena_bytes), -1
        self._hold(0, self._placement.arena_bytes)

    def before(self, line: int) -> None:
        """Leave the holes of a line's requests free, and nothing else.

        Raises:
            Misplaced: a block lies elsewhere; all that was held is free.
        """
        try:
            self._take_back(range(self._line, line))
            self._line = line
            self._open([(self._placement.offsets[i], self._placement.holes[i]) for i in self._of(line)])
        except Misplaced:
            self.end()
            raise

    def end(self) -> None:
        """Let go of all that is held."""
        for offset in self._offsets:
            self._memory.give(self._base + offset)
        self._offsets, self._sizes = [], {}

    def _of(self, line: int) -> list[int]:
        return self._born.get(line, [])

    def _take_back(self, lines: range) -> None:
        """Hold what died in lines that have run."""
        dead = [index for line in lines for index in self._dead.get(line, ())]
        free = [(self._placement.offsets[index], self._placement.holes[index]) for index in dead]
        # The largest first: each finds the free block that is as large.
        for offset, size in sorted(runs_of(free), key=lambda run: (-run[1], run[0])):
            self._take(offset, size)

    def _open(self, holes: Sequence[tuple[int, int]]) -> None:
        fillers, unit = [], self._placement.unit
        for begin, end, own in self._regions(sorted(holes)):
            for offset in [offset for offset in self._offsets if begin <= offset < end]:
                self._memory.give(self._base + offset)
                self._let_go(offset)
            # Nothing else is free now: requests are cut off from its beginning.
            at = begin
            for offset, size in own:
                if offset > at:
                    self._take(at, offset - at)
                fillers.append(self._taken(offset, size))
                at = offset + size
                # By itself: it stays where it is as long as the block, which may leave a little free between them.
                left = min(end, offset + room_of(size, unit)) - at
                if left > 0:
                    self._take(at, left)
                    at += left
            if end > at:
                self._take(at, end - at)
        for address in fillers:
            self._memory.give(address)

    def _regions(self, holes: Sequence[tuple[int, int]]) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """Stretches of what is held that the holes lie in, as (begin, end, holes): what is beside these can be held."""
        regions: list[tuple[int, int, list[tuple[int, int]]]] = []
        unit = self._placement.unit
        for offset, size in holes:
            first = bisect.bisect_right(self._offsets, offset) - 1
            last = bisect.bisect_left(self._offsets, offset + room_of(size, unit)) - 1
            # To where rooms begin and end: what is left beside the hole can be held then.
            while self._offsets[first] % unit and first and self._end(first - 1) == self._offsets[first]:
                first -= 1
            while self._end(last) % unit and self._offsets[last + 1 : last + 2] == [self._end(last)]:
                last += 1
            begin, end, own = self._offsets[first], self._end(last), [(offset, size)]
            if regions and begin < regions[-1][1]:
                begin, own = regions[-1][0], [*regions[-1][2], *own]
                end = max(end, regions[-1][1])
                del regions[-1]
            regions.append((begin, end, own))
        return regions

    def _end(self, index: int) -> int:
        return self._offsets[index] + self._sizes[self._offsets[index]]

    def _let_go(self, offset: int) -> None:
        del self._offsets[bisect.bisect_left(self._offsets, offset)], self._sizes[offset]

    def _take(self, offset: int, size: int) -> None:
        self._taken(offset, size)
        self._hold(offset, size)

    def _taken(self, offset: int, size: int) -> int:
        address = self._memory.take(size)
        if address != self._base + offset:
            self._memory.give(address)
            raise Misplaced(f"{size} bytes lie {address - self._base - offset} bytes off")
        return address

    def _hold(self, offset: int, size: int) -> None:
        bisect.insort(self._offsets, offset)
        self._sizes[offset] = size
