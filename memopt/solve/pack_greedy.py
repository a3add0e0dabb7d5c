"""Placing buffers one after another in several orders, and improving the order.

Each buffer goes to an offset in the free room left by those before it: the lowest, or the tightest gap. By size and by
breadth: Pisarchyk & Lee, "Efficient Memory Management for Deep Neural Net Inference" (2020); the tightest gap: Sekiyama
et al., "Profile-guided memory optimization for deep neural networks" (2018).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from memopt.solve.pack_problem import Piece

# Orders tried by climbing end after so many vain ones in a row, or after so many buffers placed in all.
_PATIENCE, _EFFORT = 60, 20_000

_Ints = npt.NDArray[np.int64]


class Greedy:
    """Packs a piece in a given order, again and again; keeps the best.

    Attributes:
        offsets: of the best packing, in units.
        size: bytes of the best packing.
    """

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._first = np.array(piece.first, dtype=np.int64)
        self._last = np.array(piece.last, dtype=np.int64)
        self.offsets: list[int] = []
        self.size = -1

    def place(self, order: Iterable[int], tightest: bool = False) -> int:
        """Place every buffer in this order; return the bytes that it takes, and keep it if it is the best."""
        piece = self._piece
        count = len(piece.buffers)
        # What is placed, by offset: the rows up to `number` count.
        first, last, low, high = (np.zeros(count, dtype=np.int64) for _ in range(4))
        offsets = [0] * count
        for number, buffer in enumerate(order):
            start, stop = piece.first[buffer], piece.last[buffer]
            met = (first[:number] < stop) & (last[:number] > start)
            room = piece.rooms[buffer]
            offset = _free(low[:number][met], high[:number][met], room, piece.alignments[buffer], tightest)
            offsets[buffer] = offset
            at = int(np.searchsorted(low[:number], offset))
            for column, value in ((first, start), (last, stop), (low, offset), (high, offset + room)):
                column[at + 1 : number + 1] = column[at:number]
                column[at] = value
        size = piece.size(offsets)
        if self.size < 0 or size < self.size:
            self.offsets, self.size = offsets, size
        return size

    def climb(self, order: list[int], goal: int, deadline: float) -> None:
        """Move the buffers that end highest forward in the order, and others at random, while that helps."""
        generator = random.Random(0)
        piece = self._piece
        best, vain, effort = self.place(order), 0, 0
        while best > goal and vain < _PATIENCE and effort < _EFFORT and time.monotonic() < deadline:
            new = list(order)
            top = [b for b in order if self.offsets[b] * piece.unit + piece.buffers[b].size == self.size]
            moved = generator.choice(top) if vain % 2 == 0 else generator.choice(order)
            place = new.index(moved)
            new.insert(generator.randrange(place + 1), new.pop(place))
            size = self.place(new)
            effort += len(new)
            vain += 1
            if size <= best:
                vain = 0 if size < best else vain
                best, order = size, new


def _free(low: _Ints, high: _Ints, room: int, alignment: int, tightest: bool) -> int:
    """The lowest, or the tightest, aligned offset with `room` units free; `low` ascends."""
    if not len(low):
        return 0
    ends = np.maximum.accumulate(high)
    starts = -(-np.concatenate(([0], ends)) // alignment) * alignment
    left = low - starts[:-1] - room
    fits = np.flatnonzero(left >= 0)
    if not len(fits):
        return int(starts[-1])
    return int(starts[fits[np.argmin(left[fits])] if tightest else fits[0]])


def orders(piece: Piece) -> list[list[int]]:
    """Orders worth trying, the plainest first: by falling size, area, crowdedness and life, and by rising start."""
    size, first = piece.rooms, piece.first
    life = [buffer.upper - buffer.lower for buffer in piece.buffers]
    crowd = [max(piece.loads[piece.first[b] : piece.last[b]]) for b in range(len(size))]
    keys: tuple[Callable[[int], tuple[int, ...]], ...] = (
        lambda b: (-size[b], -life[b]),
        lambda b: (-size[b] * life[b],),
        lambda b: (-crowd[b], -size[b]),
        lambda b: (-crowd[b], -size[b] * life[b]),
        lambda b: (-life[b], -size[b]),
        lambda b: (first[b], -size[b]),
        lambda b: (-piece.last[b], -size[b]),
    )
    return [sorted(range(len(size)), key=key) for key in keys]


def best_of_orders(piece: Piece, goal: int, deadline: float) -> Greedy:
    """Try every order, then climb from the best; stop at `goal` bytes or at the deadline (`time.monotonic`)."""
    greedy = Greedy(piece)
    best: tuple[int, list[int]] | None = None
    for order in orders(piece):
        for tightest in (False, True):
            if best is not None and (greedy.size <= goal or time.monotonic() >= deadline):
                return greedy
            size = greedy.place(order, tightest)
            if best is None or size < best[0]:
                best = (size, order)
    assert best is not None
    greedy.climb(best[1], goal, deadline)
    return greedy


def by_size(piece: Piece) -> int:
    """Bytes that the plainest heuristic needs: by falling size, each at the lowest free offset."""
    return Greedy(piece).place(orders(piece)[0])
