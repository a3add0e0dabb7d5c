"""Where each buffer goes in one arena, so that those alive together share no byte and the arena is as small as can be.

`pack` tries heuristics first (`pack_greedy`), then searches exactly (`pack_search`) and by beams (`pack_beam`) in turn;
`check_packing` of the tests judges.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Iterator, Sequence

from memopt.solve.pack_beam import WEIGHTS, Beam, Switches, Weights
from memopt.solve.pack_greedy import best_of_orders
from memopt.solve.pack_problem import Buffer, Piece, pieces, refuse_malformed
from memopt.solve.pack_search import FEWEST, FORCED, LOWEST, NEARLY_FORCED, Outcome, Search, ranking

__all__ = ["Buffer", "Packing", "Switches", "pack"]

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
# Beams for each of `WEIGHTS` in the first round; each round doubles them.
_BEAMS = 2
# States of each level of a beam: narrow ones win soonest, if many weights are tried; one of so many is wider by a
# factor, and one of so many of these again.
_WIDTH, _WIDER, _WIDENING = 10, 3, 4
# After the first of each of `WEIGHTS`, each weight is multiplied by up to this factor or its inverse.
_VARIED = 2.0
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


def pack(
    buffers: Sequence[Buffer], capacity: int | None = None, timeout: float = 10.0, switches: Switches | None = None
) -> Packing:
    """Place buffers so that those alive together share no byte.

    Without a capacity, the smallest arena found is returned; with one, the first that fits. Where none was found that
    fits, the best one is returned: it is proved that none can fit where `lower_bound` is above the capacity.

    Args:
        buffers: half-open lives, sizes in bytes, alignments; plain tuples (lower, upper, size[, alignment]) do as well.
        capacity: bytes that the arena may have.
        timeout: seconds after which the best packing found so far is returned; the first heuristic always ends.
        switches: parts of the search to do without; by default none.

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
    works = [_Work(piece, switches or Switches()) for piece in pieces(given)]
    bound = max([least, *(work.lower_bound for work in works)])
    goal = bound if capacity is None else max(bound, capacity)
    for work in works:
        work.heuristics(goal, deadline)
    bound = _least(works, bound, deadline) if capacity is None else _within(works, bound, capacity, deadline)
    offsets = [0] * len(given)
    for work in works:
        for member, offset in zip(work.piece.members, work.offsets, strict=True):
            offsets[member] = offset * work.piece.unit
    size = max([least, *(work.size for work in works)])
    return Packing(tuple(offsets), size, bound, size == bound)


def _least(works: list[_Work], bound: int, deadline: float) -> int:
    """Make the largest piece smaller, while there is time; return what is proved to be needed.

    The arena is as large as that piece needs, and the others need be no smaller.
    """
    goal = bound
    while waiting := [work for work in works if work.size > goal]:
        work = max(waiting, key=lambda work: work.size)
        now = time.monotonic()
        until = now + (deadline - now) / len(waiting)
        while work.size > max(goal, work.lower_bound) and time.monotonic() < until and work.searchable:
            work.search(max(goal, work.lower_bound), True, until)
        bound = max(bound, work.lower_bound)
        goal = max(goal, work.size)
    return bound


def _within(works: list[_Work], bound: int, capacity: int, deadline: float) -> int:
    """Search each piece in turn, until all fit, one cannot or the time is over; return what is proved to be needed."""
    while bound <= capacity and time.monotonic() < deadline:
        waiting = [work for work in works if work.size > capacity and work.searchable]
        if not waiting:
            break
        for work in waiting:
            work.search(capacity, False, deadline)
            bound = max(bound, work.lower_bound)
    return bound


class _Work:
    """What is known of one piece: its best packing so far, and what it cannot do without."""

    def __init__(self, piece: Piece, switches: Switches) -> None:
        self.piece = piece
        self.offsets: list[int] = []
        self.size = 0
        self.lower_bound = piece.lower_bound
        self._switches = switches
        self._exact: Search | None = None
        self._beam: Beam | None = None
        self._turns = self._all_turns()

    @property
    def searchable(self) -> bool:
        """Whether the piece is small enough for anything but heuristics."""
        return self._exactly or self._beams

    @property
    def _exactly(self) -> bool:
        return self._switches.exact and self.piece.meetings <= _PAIRS

    @property
    def _beams(self) -> bool:
        return self._switches.beam and self.piece.meetings <= _PAIRS and Beam.can(self.piece)

    def heuristics(self, goal: int, deadline: float) -> None:
        """Pack it somehow, at best in `goal` bytes."""
        greedy = best_of_orders(self.piece, goal, deadline)
        self.offsets, self.size = greedy.offsets, greedy.size

    def search(self, goal: int, move: bool, deadline: float) -> None:
        """Take the next turn in searching for a packing of at most `goal` bytes.

        The first turns of a kind also try, with `move`, capacities nearer to the best packing known; where the goal is
        refuted, they go on with the next size.
        """
        turn = next(self._turns)
        low = goal
        for step in range(_STEPS if move and turn.first else 1):
            if self.size <= goal or time.monotonic() >= deadline:
                return
            capacity = (low + self.size) // 2 if step else goal
            outcome = turn.run(self, capacity, deadline)
            if outcome is not Outcome.FOUND:
                low = capacity
            if outcome is Outcome.IMPOSSIBLE:
                self.lower_bound = max(self.lower_bound, self.piece.next_size(capacity))
                if not move:
                    return
                goal = low = max(goal, self.lower_bound)

    def _all_turns(self) -> Iterator[_Exact | _Wide]:
        """Turns without end: in each round some exact settings, beams, and the other exact settings."""
        beams = 0
        for round_number in itertools.count():
            exact = [_Exact(round_number, setting) for setting in range(len(_SETTINGS) if self._exactly else 0)]
            more = len(WEIGHTS) * _BEAMS << round_number if self._beams else 0
            yield from exact[:_STEPPING]
            yield from map(_Wide, range(beams, beams + more))
            yield from exact[_STEPPING:]
            beams += more

    def exactly(self, capacity: int, ranks: list[int], few: int, limit: int, deadline: float) -> Outcome:
        """Search exactly, as `Search.run`."""
        self._exact = self._exact or Search(self.piece)
        outcome = self._exact.run(capacity, ranks, few, limit, deadline)
        if outcome is Outcome.FOUND:
            self._keep(self._exact.offsets)
        return outcome

    def by_beam(self, capacity: int, width: int, weights: Weights, deadline: float, noise: float, seed: int) -> Outcome:
        """Search by a beam, as `Beam.run`."""
        self._beam = self._beam or Beam(self.piece, self._switches)
        if not self._beam.run(capacity, width, weights, deadline, noise, seed):
            return Outcome.STOPPED
        self._keep(self._beam.offsets)
        return Outcome.FOUND

    def _keep(self, offsets: list[int]) -> None:
        if (size := self.piece.size(offsets)) < self.size:
            self.offsets, self.size = offsets, size


@dataclasses.dataclass(frozen=True)
class _Exact:
    """A turn of exact search."""

    round_number: int
    setting: int

    @property
    def first(self) -> bool:
        return self.setting < _STEPPING

    def run(self, work: _Work, capacity: int, deadline: float) -> Outcome:
        few, letters = _SETTINGS[self.setting]
        seed = self.round_number * len(_SETTINGS) + self.setting
        ranks = ranking(work.piece, letters, _NOISE if self.round_number else 0.0, seed)
        limit = (_NODES + _NODES_EACH * len(work.piece.buffers)) << self.round_number
        return work.exactly(capacity, ranks, few, limit, deadline)


@dataclasses.dataclass(frozen=True)
class _Wide:
    """A turn of beam search."""

    number: int

    @property
    def first(self) -> bool:
        return self.number == 0

    def run(self, work: _Work, capacity: int, deadline: float) -> Outcome:
        again, setting = divmod(self.number, len(WEIGHTS))
        weights, noise, width = WEIGHTS[setting], _NOISE if again else 0.0, _WIDTH
        if again:
            generator = random.Random(self.number)
            weights = Weights(*(v * _VARIED ** generator.uniform(-1, 1) for v in dataclasses.astuple(weights)))
        while (again := again + 1) % _WIDENING == 0:
            width, again = width * _WIDER, again // _WIDENING - 1
        return work.by_beam(capacity, width, weights, deadline, noise, self.number)
