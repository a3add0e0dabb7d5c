"""Beam search: is there a packing within a capacity? It finds packings of tight lists and refutes none.

A state is a set of placed buffers and the floors of the others, as in `pack_search`. All states of a level have placed
equally many. Each goes on in one section, where the choices are fewest, with every buffer that could be the lowest
there now; if something else still fits beneath such a buffer, what fits beneath comes first. Of the states that follow
the best are kept, by how even their tops are, how much slack is left to each section and how many choices there are.

Sections with the fewest choices: Haralick & Elliott, "Increasing tree search efficiency for constraint satisfaction
problems" (1980). Even tops: Burke, Kendall & Whitwell, "A new placement heuristic for the orthogonal stock-cutting
problem" (2004). Beams for packing in strips: Bennell & Song, "A beam search implementation for the irregular shape
packing problem" (2010). All states of a level are handled at once, in numpy.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from memopt.solve.pack_problem import Piece

# Above these, for a piece: buffers, and buffers of all sections together; tables of their products must fit in memory.
_BUFFERS, _MEMBERS = 2_000, 400_000
# Items of one table that is handled at once.
_TABLE = 2_000_000

_Ints = npt.NDArray[Any]
_Bools = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Switches:
    """Parts of the search, all of them on by default; `benchmarks/packing_hard.py` shows what each is worth.

    Attributes:
        beam: search by beams as well as exactly.
        exact: search exactly as well as by beams.
        even: prefer states with even tops.
        fewest: go on where the choices are fewest; else in the lowest section.
        beneath: what still fits beneath a choice comes before it.
        distinct: keep one of several states that are equal.
    """

    beam: bool = True
    exact: bool = True
    even: bool = True
    fewest: bool = True
    beneath: bool = True
    distinct: bool = True


@dataclasses.dataclass(frozen=True)
class Weights:
    """What makes a state good, and where it goes on.

    Attributes:
        steps: a cost for each two neighbouring sections whose lowest floors differ.
        heights: a cost for each such difference, as a share of the capacity.
        slack: a gain for the logarithm of each section's slack, as a share of the capacity.
        grain: added to that share before its logarithm is taken.
        waste: a cost for slack that is used up, as a share of the capacity.
        choices: a gain for the logarithm of how many buffers could be the lowest, of each section.
        lives: a cost for sections of lives that are still to be placed, in mean lives.
        above: choices that each choice counts for, beyond itself, that something still fits beneath.
        low: choices that a floor as high as the capacity counts for.
        tight: choices that a slack as large as the capacity counts for.
    """

    steps: float = 1.0
    heights: float = 0.0
    slack: float = 0.0
    grain: float = 0.001
    waste: float = 0.0
    choices: float = 0.0
    lives: float = 0.0
    above: float = 4.0
    low: float = 0.9
    tight: float = 0.0


# Each wins on some lists.
WEIGHTS = (
    Weights(slack=0.3),
    Weights(steps=2.5, heights=1.5, slack=0.34, grain=0.04, waste=0.8, above=0.0, low=5.0),
    Weights(steps=1.35, heights=8.6, slack=2.5, grain=0.06, waste=3.0, choices=0.2, above=0.0, low=20.0),
    Weights(slack=0.3, lives=0.3, low=5.0, tight=3.0),
)


@dataclasses.dataclass
class _States:
    """States of one level, one to a row; each is what a row of the level before became by placing one buffer."""

    floor: _Ints  # by buffer; far for what is placed
    latest: _Ints  # by section: the highest offset at which its next buffer may start
    origin: _Ints
    placed: _Ints
    offset: _Ints
    lowest: _Ints  # by section: the lowest floor of what is to come; far where there is none
    counts: _Ints  # by section: how many buffers could be its next

    def take(self, rows: npt.NDArray[Any]) -> _States:
        return _States(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))


class Beam:
    """Looks for packings of one piece.

    Attributes:
        offsets: the packing found last, in units.
        states: how many were looked at in all.
    """

    def __init__(self, piece: Piece, switches: Switches | None = None) -> None:
        """Tables of who meets whom, and when."""
        self._piece, self._switches = piece, switches or Switches()
        count, sections = len(piece.buffers), len(piece.sections)
        most = max(max(piece.loads), max(piece.rooms)) + max(piece.alignments)
        self._type = np.int32 if 4 * most < 1 << 30 else np.int64
        self._far = 1 << 30 if self._type is np.int32 else 1 << 61
        self._rooms, self._alignments = self._ints(piece.rooms), self._ints(piece.alignments)
        self._aligned = max(piece.alignments) > 1
        first, last = np.array(piece.first), np.array(piece.last)
        self._lengths = (last - first) / np.mean(last - first)
        # The buffers of all sections, one section after another, and the sections of all buffers likewise.
        sizes = [len(section) for section in piece.sections]
        self._members = np.concatenate([np.array(section) for section in piece.sections])
        self._section = np.repeat(np.arange(sections), sizes)
        self._starts = np.cumsum([0, *sizes[:-1]])
        self._lived = np.concatenate([np.arange(*life) for life in zip(first, last, strict=True)])
        self._lives = np.cumsum([0, *(last - first)[:-1]])
        moments = np.arange(sections)
        self._covers = (moments >= first[:, None]) & (moments < last[:, None])
        self._meets = np.zeros((count, count), dtype=bool)
        for buffer, others in enumerate(piece.neighbours):
            self._meets[buffer, list(others)] = True
        self._keys = np.random.default_rng(0).integers(1, 1 << 62, count) | 1
        self.offsets: list[int] = []
        self.states = 0

    @staticmethod
    def can(piece: Piece) -> bool:
        """Whether the tables of a piece are small enough."""
        return len(piece.buffers) <= _BUFFERS and sum(map(len, piece.sections)) <= _MEMBERS

    def run(
        self, capacity: int, width: int, weights: Weights, deadline: float, noise: float = 0.0, seed: int = 0
    ) -> bool:
        """Look for a packing of at most `capacity` bytes with at most `width` states of each level.

        Args:
            capacity: bytes.
            width: states.
            weights: by which states are kept.
            deadline: by `time.monotonic`.
            noise: shakes what a state is worth, by so many of its standard deviations in the level.
            seed: of the noise.
        """
        piece, generator = self._piece, np.random.default_rng(seed)
        tops = [(capacity + spare) // piece.unit for spare in piece.spare]
        slack = self._ints([top - load for top, load in zip(tops, piece.loads, strict=True)])
        highest = self._ints([(capacity - buffer.size) // piece.unit for buffer in piece.buffers])
        if slack.min() < 0 or highest.min() < 0:
            return False
        one = np.zeros(1, dtype=np.int64)
        states = self._judged(np.zeros((1, len(piece.buffers)), self._type), slack[None, :], one, one, one)
        levels: list[_States] = []
        share = 1.0 / max(tops)
        for _ in piece.buffers:
            children = self._children(states, weights, share, highest, deadline)
            if children is None:
                return False
            if len(children.floor) > width:
                cost = self._cost(children, slack, weights, share)
                if noise:
                    cost = cost + noise * (np.std(cost) + 1e-9) * generator.standard_normal(len(cost))
                children = children.take(np.argpartition(cost, width)[:width])
            levels.append(children)
            states = children
        offsets, row = [0] * len(piece.buffers), 0
        for level in reversed(levels):
            offsets[level.placed[row]] = int(level.offset[row])
            row = level.origin[row]
        self.offsets = offsets
        return True

    def _ints(self, values: Any) -> _Ints:
        return np.array(values, dtype=self._type)

    def _by_section(self, of_members: _Ints) -> _Ints:
        """The least of each section's members."""
        return np.minimum.reduceat(of_members, self._starts, axis=1)

    def _judged(self, floor: _Ints, latest: _Ints, origin: _Ints, placed: _Ints, offset: _Ints) -> _States:
        floors = floor[:, self._members]
        lowest = self._by_section(floors)
        counts = np.add.reduceat(floors <= latest[:, self._section], self._starts, axis=1, dtype=np.int32)
        return _States(floor, latest, origin, placed, offset, lowest, counts)

    def _children(
        self, states: _States, weights: Weights, share: float, highest: _Ints, deadline: float
    ) -> _States | None:
        """What the states may become by placing one buffer; None where none can be, or at the deadline."""
        origin, placed = self._choices(states, weights, share)
        offset = states.floor[origin, placed]
        fits = ~((states.latest[origin] < offset[:, None]) & self._covers[placed]).any(1)
        origin, placed, offset = origin[fits], placed[fits], offset[fits]
        if self._switches.distinct and len(origin):
            origin, placed, offset = self._distinct(states, origin, placed, offset)
        parts = []
        step = max(1, _TABLE // len(self._members))
        for at in range(0, len(origin), step):
            if time.monotonic() >= deadline:
                return None
            rows = slice(at, at + step)
            floor = self._floors(states, origin[rows], placed[rows], offset[rows])
            latest = states.latest[origin[rows]] + self._covers[placed[rows]] * self._rooms[placed[rows], None]
            part = self._judged(floor, latest, origin[rows], placed[rows], offset[rows])
            self.states += len(floor)
            left = floor < self._far
            keep = ~((part.lowest > latest) & (part.lowest < self._far)).any(1) & ~((floor > highest) & left).any(1)
            if keep.any():
                parts.append(part.take(np.flatnonzero(keep)))
        if not parts:
            return None
        if len(parts) == 1:
            return parts[0]
        joined = (np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(_States))
        return _States(*joined)

    def _choices(self, states: _States, weights: Weights, share: float) -> tuple[_Ints, _Ints]:
        """Pairs of a state and a buffer that it may place next."""
        floor, latest, far = states.floor, states.latest, self._far
        key = states.lowest * share * weights.low
        carried: _Bools | None = None
        if self._switches.beneath:
            # Something fits beneath a buffer if it ends below its floor.
            ends = self._by_section((floor + self._rooms)[:, self._members])
            under = np.minimum.reduceat(ends[:, self._lived], self._lives, axis=1)
            carried = (under <= floor) & (floor < far)
        if self._switches.fewest:
            key = key + states.counts + weights.tight * share * (latest - states.lowest)
            if carried is not None and weights.above:
                could = (floor[:, self._members] <= latest[:, self._section]) & carried[:, self._members]
                key = key + weights.above * np.add.reduceat(could, self._starts, axis=1, dtype=np.int32)
        chosen = np.where(states.counts > 0, key, np.inf).argmin(1)
        origins, buffers = [], []
        for row, section in enumerate(chosen):
            members = np.array(self._piece.sections[section])
            found = members[floor[row, members] <= latest[row, section]]
            if carried is not None and carried[row, found].any():
                found = self._from_beneath(floor[row], carried[row], found)
            origins.append(np.full(len(found), row))
            buffers.append(found)
        return np.concatenate(origins), np.concatenate(buffers)

    def _from_beneath(self, floor: _Ints, carried: _Bools, found: _Ints) -> _Ints:
        """Put what fits beneath in the place of what is carried, down to what nothing fits beneath."""
        seen = np.zeros(len(floor), dtype=bool)
        seen[found] = True
        upper, ends = found[carried[found]], floor + self._rooms
        while len(upper):
            beneath = (self._meets[upper] & (ends <= floor[upper, None])).any(0) & ~seen
            seen |= beneath
            upper = np.flatnonzero(beneath & carried)
        return np.flatnonzero(seen & ~carried)

    def _distinct(self, states: _States, origin: _Ints, placed: _Ints, offset: _Ints) -> tuple[_Ints, _Ints, _Ints]:
        """One of each that would become the same state: by a sum of floors, each times a random number."""
        floor = self._floors(states, origin, placed, offset).astype(np.int64)
        _, rows = np.unique(floor @ self._keys, return_index=True)
        return origin[rows], placed[rows], offset[rows]

    def _floors(self, states: _States, origin: _Ints, placed: _Ints, offset: _Ints) -> _Ints:
        """Floors after each placing."""
        floor = states.floor[origin]
        ends = (offset + self._rooms[placed])[:, None]
        if self._aligned:
            ends = -(-ends // self._alignments) * self._alignments
        np.maximum(floor, ends, out=floor, where=self._meets[placed] & (floor < self._far))
        floor[np.arange(len(placed)), placed] = self._far
        return floor

    def _cost(self, states: _States, slack: _Ints, weights: Weights, share: float) -> npt.NDArray[np.float64]:
        """What is kept is what costs least."""
        alive = states.lowest < self._far
        left = np.where(alive, states.latest - states.lowest, 0) * share
        cost = np.zeros(len(states.floor))
        if self._switches.even:
            change = np.diff(np.where(alive, states.lowest, 0), axis=1)
            cost += weights.steps * np.count_nonzero(change, axis=1)
            if weights.heights:
                cost += weights.heights * share * np.abs(change).sum(1)
        if weights.slack:
            cost -= weights.slack * (np.log(left + weights.grain) * alive).sum(1)
        if weights.waste:
            cost += weights.waste * ((slack * share - left) * alive).sum(1)
        if weights.choices:
            cost -= weights.choices * np.log(np.maximum(states.counts, 1)).sum(1)
        if weights.lives:
            cost += weights.lives * (states.floor < self._far) @ self._lengths
        return cost
