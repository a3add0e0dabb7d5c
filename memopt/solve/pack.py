"""Where each buffer goes in one arena, so that those alive together share no byte and the arena is as small as can be.

`pack` tries heuristics first (`pack_greedy`), then searches exactly (`pack_search`); `pack_check.check_packing` judges.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence

from memopt.solve.pack_greedy import best_of_orders
from memopt.solve.pack_problem import Buffer, Piece, pieces, refuse_malformed
from memopt.solve.pack_search import FEWEST, FORCED, LOWEST, NEARLY_FORCED, Outcome, Search, ranking

__all__ = ["Buffer", "Packing", "pack"]

# Nodes of each search in the first round over all settings, for each buffer and beyond that; each round doubles them.
_NODES_EACH, _NODES = 2, 300
# From the second round on what ranks the buffers is shaken by at most this share.
_NOISE = 0.3
# Capacities tried with the first settings of a round, between the least not refuted and the best packing known.
_STEPS, _STEPPING = 4, 2
# The first is cheap and enough for most lists of real models; the next win most often where lists are tight.
_SETTINGS = (
    (LOWEST, "TWA"),
    (FEWEST, "TWA"),
    (NEARLY_FORCED, "TWA"),
    (FORCED, "WAT"),
    (FEWEST, "TAW"),
    (FEWEST, "WAT"),
    (LOWEST, "TAW"),
    (FORCED, "TAW"),
    (NEARLY_FORCED, "WAT"),
    (LOWEST, "WAT"),
    (FORCED, "TWA"),
    (NEARLY_FORCED, "TAW"),
)
# Pairs of buffers alive together above which only heuristics are tried.
_PAIRS = 5_000_000


@dataclasses.dataclass(frozen=True)
class Packing:
    """Offsets of buffers in one arena.

    Attributes:
        offsets: bytes from the arena's start, one for each buffer; never-live and empty buffers lie at 0.
        size: bytes of the arena: every buffer ends at or below it.
        lower_bound: bytes that no packing can do without, as far as proved.
        optimal: whether `size` is the least possible, which is proved when it equals `lower_bound`.
    """

    offsets: tuple[int, ...]
    size: int
    lower_bound: int
    optimal: bool


def pack(buffers: Sequence[Buffer], capacity: int | None = None, timeout: float = 10.0) -> Packing:
    """Place buffers so that those alive together share no byte.

    Without a capacity, the smallest arena found is returned; with one, the first that fits. Where none was found that
    fits, the best one is returned: it is proved that none can fit where `lower_bound` is above the capacity.

    Args:
        buffers: half-open lives, sizes in bytes, alignments; plain tuples (lower, upper, size[, alignment]) do as well.
        capacity: bytes that the arena may have.
        timeout: seconds after which the best packing found so far is returned; the first heuristic always ends.

    Raises:
        TypeError: a field that is no int.
        ValueError: a life that ends before it starts, a negative size or capacity, an alignment below 1, or a timeout
            that is not positive.
    """
    given = [Buffer(*buffer) for buffer in buffers]
    refuse_malformed(given)
    if capacity is not None and capacity < 0:
        raise ValueError(f"the capacity {capacity} is negative")
    if not timeout > 0:
        raise ValueError(f"the timeout must be more than 0 seconds, not {timeout}")
    deadline = time.monotonic() + timeout
    # What is never live takes no room from others, yet lies inside the arena.
    least = max((buffer.size for buffer in given), default=0)
    works = [_Work(piece) for piece in pieces(given)]
    bound = max([least, *(work.lower_bound for work in works)])
    goal = bound if capacity is None else max(bound, capacity)
    for work in works:
        work.heuristics(goal, deadline)
    # The largest first: the arena is as large as that one needs, and the others need be no smaller.
    while (waiting := [work for work in works if work.size > goal]) and (capacity is None or bound <= capacity):
        work = max(waiting, key=lambda work: work.size)
        now = time.monotonic()
        work.search(goal, capacity is None, now + (deadline - now) / len(waiting))
        bound = max(bound, work.lower_bound)
        goal = max(goal, work.size)
    offsets = [0] * len(given)
    for work in works:
        for member, offset in zip(work.piece.members, work.offsets, strict=True):
            offsets[member] = offset * work.piece.unit
    size = max([least, *(work.size for work in works)])
    return Packing(tuple(offsets), size, bound, size == bound)


class _Work:
    """What is known of one piece: its best packing so far, and what it cannot do without."""

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.offsets: list[int] = []
        self.size = 0
        self.lower_bound = piece.lower_bound

    def heuristics(self, goal: int, deadline: float) -> None:
        """Pack it somehow, at best in `goal` bytes."""
        greedy = best_of_orders(self.piece, goal, deadline)
        self.offsets, self.size = greedy.offsets, greedy.size

    def search(self, goal: int, move: bool, deadline: float) -> None:
        """Search until it takes at most `goal` bytes, or that is refuted; then, with `move`, go on with the next size.

        Each setting is tried at the goal itself, the first, with `move`, then nearer to the best packing known.
        """
        if self.piece.meetings > _PAIRS:
            return
        search = Search(self.piece)
        first = _NODES + _NODES_EACH * len(self.piece.buffers)
        for number in itertools.count():
            level, setting = divmod(number, len(_SETTINGS))
            few, letters = _SETTINGS[setting]
            ranks = ranking(self.piece, letters, _NOISE if level else 0.0, seed=number)
            low = goal
            for step in range(_STEPS if move and setting < _STEPPING else 1):
                if self.size <= goal or time.monotonic() >= deadline:
                    return
                capacity = (low + self.size) // 2 if step else goal
                outcome = search.run(capacity, ranks, few, first << level, deadline)
                if outcome is Outcome.FOUND:
                    self.offsets, self.size = search.offsets, self.piece.size(search.offsets)
                else:
                    low = capacity
                if outcome is Outcome.IMPOSSIBLE:
                    self.lower_bound = max(self.lower_bound, self.piece.next_size(capacity))
                    if not move:
                        return
                    goal = low = max(goal, self.lower_bound)
