"""Exact search: is there a packing within a capacity?

A buffer's *floor* is the lowest offset above all placed buffers that it meets. In a packing in which nothing can slide
down, a buffer lies either on its floor or on an unplaced one; so each step takes one buffer that nothing fits beneath,
and tries it on its floor first, then *lifted*: to be carried by some neighbour that is placed later. From this follow
lower bounds of the offsets, and a section whose lowest bound and unplaced sizes together exceed the capacity refutes.

After Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning" (ASPLOS 2023):
canonical solutions, bounds by section, dynamic ordering, decomposition in time. Its single rising floor of the whole
packing is not used here: what is lifted says the same for each buffer alone, so that the search may stay where the
choices are fewest, in the sense of Haralick & Elliott, "Increasing tree search efficiency for constraint satisfaction
problems" (1980). Refuted subproblems are remembered; twins are tried once; whoever calls restarts with other orders,
after Gomes et al., "Boosting combinatorial search through randomization" (1998).
"""

from __future__ import annotations

import array
import enum
import hashlib
import operator
import random
import time
from collections.abc import Callable, Iterable

from memopt.solve.pack_problem import Piece

_FAR = 1 << 62
# Refuted subproblems that are remembered (some 150 bytes each).
_REMEMBERED = 200_000
# Rounds over blocked buffers in which a bound may follow from another; stopping early leaves weaker bounds.
_ROUNDS = 3


class Outcome(enum.Enum):
    """How a search ended."""

    FOUND = enum.auto()
    IMPOSSIBLE = enum.auto()
    STOPPED = enum.auto()


# Values of `few` in `Search.run`: never mind how many choices a section has, or always take where they are fewest.
LOWEST, FORCED, NEARLY_FORCED, FEWEST = 0, 1, 2, _FAR


class _Frame:
    """A set of buffers to place, and the way that is being tried."""

    __slots__ = ("chosen", "key", "mark", "members", "parts")

    def __init__(self, members: list[int]) -> None:
        self.members = members
        self.mark = 0  # how long the trail was before the chosen buffer was placed
        self.chosen = -1
        self.key: bytes | None = None
        self.parts: list[list[int]] = []


class Search:
    """Looks for packings of one piece; what it refuted at one capacity helps at every lower one.

    Attributes:
        offsets: the packing found last, in units.
        nodes: subproblems visited in all.
    """

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._refuted: dict[bytes, int] = {}
        self._members = [_getter(section) for section in piece.sections]
        self._order = sorted(range(len(piece.buffers)), key=lambda buffer: (piece.first[buffer], buffer))
        self.offsets: list[int] = []
        self.nodes = 0

    def run(self, capacity: int, ranks: list[int], few: int, limit: int, deadline: float) -> Outcome:
        """Look for a packing of at most `capacity` bytes in at most `limit` nodes.

        A section's choices are the buffers that could be its lowest now. The next buffer is among the choices of a
        section that has at most `few`, of the fewest; else any. Of these it is the one with the lowest floor, then the
        lowest in `ranks`. `deadline` is by `time.monotonic`.
        """
        self._start(capacity, ranks, few)
        stack = [_Frame(list(self._order))]
        last_node, steps = self.nodes + limit, 0
        signal = "enter"
        while stack:
            frame = stack[-1]
            self.nodes += frame.key is None
            if self.nodes > last_node or (not steps % 16 and time.monotonic() >= deadline):
                return Outcome.STOPPED
            steps += 1
            if signal == "failed":
                self._undo(frame.mark)
                self._lift(frame)
                signal = "enter"
            if signal == "done" and frame.parts:
                stack.append(_Frame(frame.parts.pop()))
                signal = "enter"
            elif signal == "done":
                stack.pop()
            elif self._choose(frame):
                self._place(frame)
                signal = "done"
            else:
                self._remember(frame)
                stack.pop()
                signal = "failed"
        if signal == "failed":
            return Outcome.IMPOSSIBLE
        self.offsets = list(self._floor)
        return Outcome.FOUND

    def _start(self, capacity: int, ranks: list[int], few: int) -> None:
        piece = self._piece
        count = len(piece.buffers)
        self._capacity, self._ranks, self._few = capacity, ranks, few
        self._tops = [(capacity + spare) // piece.unit for spare in piece.spare]
        self._highest = [(capacity - buffer.size) // piece.unit for buffer in piece.buffers]
        self._left = list(piece.loads)
        self._floor = [0] * count
        self._placed = [False] * count
        self._lifted = [False] * count
        self._bound = [0] * count  # lower bounds of the offsets to come; _FAR for what is placed
        self._trail: list[tuple[int, int, bool]] = []  # buffer, its floor before (-1: it was placed), was it lifted

    def _choose(self, frame: _Frame) -> bool:
        """Pick the next buffer of a frame; False where none can be: the frame is refuted."""
        members, bound = frame.members, self._bound
        self._bound_lifted(members)
        if any(map(operator.gt, map(bound.__getitem__, members), map(self._highest.__getitem__, members))):
            return False
        span = range(self._piece.first[members[0]], max(map(self._piece.last.__getitem__, members)))
        # The highest offset at which a section's next buffer may start, and where each of its buffers could.
        latest = [self._tops[section] - self._left[section] for section in span]
        starts = [self._members[section](bound) for section in span]
        if any(high < min(values) < _FAR for high, values in zip(latest, starts, strict=True)):
            return False
        if self._known(frame):
            return False
        if self._few:
            counts = [sum(map(high.__ge__, values)) for high, values in zip(latest, starts, strict=True)]
            for count in sorted(count for count in {*counts} if 0 < count <= self._few):
                tightest = [
                    buffer
                    for section, high, number in zip(span, latest, counts, strict=True)
                    if number == count
                    for buffer in self._piece.sections[section]
                    if bound[buffer] <= high
                ]
                if self._pick(frame, dict.fromkeys(tightest)):
                    return True
        return self._pick(frame, members)

    def _pick(self, frame: _Frame, candidates: Iterable[int]) -> bool:
        """Choose the one with the lowest floor, then by rank, that nothing fits beneath; False where there is none."""
        scored = [
            (self._floor[buffer], self._ranks[buffer], buffer) for buffer in candidates if not self._lifted[buffer]
        ]
        while scored:
            best = min(scored)
            if self._nothing_fits_beneath(best[-1]):
                frame.chosen = best[-1]
                return True
            scored.remove(best)
        return False

    def _bound_lifted(self, members: list[int]) -> None:
        """Lower bounds of the offsets: a lifted buffer lies on a neighbour, so above the lowest end of them all."""
        lifted = [buffer for buffer in members if self._lifted[buffer]]
        if not lifted:
            return
        piece, floor, bound = self._piece, self._floor, self._bound
        # The lowest buffer of all is not lifted; whoever is lies on another, so higher than that one.
        base = min((floor[buffer] for buffer in members if not self._lifted[buffer]), default=_FAR)
        for buffer in lifted:
            bound[buffer] = max(floor[buffer], base) + 1
        for _ in range(_ROUNDS):
            changed = False
            for buffer in lifted:
                # Placed neighbours are bounded by _FAR, so that only those to come count.
                carried = min(bound[other] + piece.rooms[other] for other in piece.neighbours[buffer])
                value = max(carried, bound[buffer])
                value = -(-value // piece.alignments[buffer]) * piece.alignments[buffer]
                if value > bound[buffer]:
                    bound[buffer] = value
                    changed = True
            if not changed:
                return

    def _nothing_fits_beneath(self, buffer: int) -> bool:
        floor, bound, rooms = self._floor[buffer], self._bound, self._piece.rooms
        return all(bound[other] + rooms[other] > floor for other in self._piece.neighbours[buffer])

    def _place(self, frame: _Frame) -> None:
        """Put the chosen buffer on its floor, raise its neighbours', and cut what is left where no life crosses."""
        piece, floor, chosen = self._piece, self._floor, frame.chosen
        frame.mark = len(self._trail)
        self._trail.append((chosen, -1, False))
        self._placed[chosen] = True
        self._bound[chosen] = _FAR
        room = piece.rooms[chosen]
        for section in range(piece.first[chosen], piece.last[chosen]):
            self._left[section] -= room
        end = floor[chosen] + room
        for other in piece.neighbours[chosen]:
            if floor[other] < end and not self._placed[other]:
                self._trail.append((other, floor[other], self._lifted[other]))
                self._bound[other] = floor[other] = -(-end // piece.alignments[other]) * piece.alignments[other]
                self._lifted[other] = False
        frame.parts = self._cut(buffer for buffer in frame.members if buffer != chosen)

    def _cut(self, members: Iterable[int]) -> list[list[int]]:
        """Cut into stretches of time; the smallest last, where it is taken first."""
        parts: list[list[int]] = []
        end = -1
        for buffer in members:
            if self._piece.first[buffer] >= end:
                parts.append([])
            parts[-1].append(buffer)
            end = max(end, self._piece.last[buffer])
        parts.sort(key=len, reverse=True)
        return parts

    def _undo(self, mark: int) -> None:
        piece, trail = self._piece, self._trail
        while len(trail) > mark:
            buffer, floor, lifted = trail.pop()
            if floor < 0:
                self._placed[buffer] = False
                self._bound[buffer] = self._floor[buffer]
                for section in range(piece.first[buffer], piece.last[buffer]):
                    self._left[section] += piece.rooms[buffer]
            else:
                self._bound[buffer] = self._floor[buffer] = floor
                self._lifted[buffer] = lifted

    def _lift(self, frame: _Frame) -> None:
        """Go on without the chosen buffer on its floor; its twins cannot lie there either: swapped, it would."""
        for buffer in (frame.chosen, *self._piece.twins[frame.chosen]):
            if not self._placed[buffer] and not self._lifted[buffer]:
                self._trail.append((buffer, self._floor[buffer], False))
                self._lifted[buffer] = True

    def _known(self, frame: _Frame) -> bool:
        """Whether the frame was refuted before; asked once, before anything is tried."""
        if frame.key is not None:
            return False
        state = array.array("q", frame.members)
        state.extend(2 * self._floor[buffer] + self._lifted[buffer] for buffer in frame.members)
        frame.key = hashlib.blake2b(state.tobytes(), digest_size=16).digest()
        return self._refuted.get(frame.key, -1) >= self._capacity

    def _remember(self, frame: _Frame) -> None:
        if frame.key is not None and (len(self._refuted) < _REMEMBERED or frame.key in self._refuted):
            self._refuted[frame.key] = max(self._capacity, self._refuted.get(frame.key, -1))


def _getter(section: tuple[int, ...]) -> Callable[[list[int]], tuple[int, ...]]:
    """What reads the items at these places of a list."""
    if len(section) == 1:  # itemgetter would give the item, not a tuple
        return lambda values: (values[section[0]],)
    return operator.itemgetter(*section)


def ranking(piece: Piece, letters: str, noise: float = 0.0, seed: int = 0) -> list[int]:
    """Rank the buffers by (T) the load of their fullest section, (W) length of life and (A) area, in the given order.

    The larger come first; `noise` shakes each value by at most that share of it.
    """
    generator = random.Random(seed)
    values: dict[str, list[float]] = {
        "T": [max(piece.loads[piece.first[b] : piece.last[b]]) for b in range(len(piece.buffers))],
        "W": [buffer.upper - buffer.lower for buffer in piece.buffers],
        "A": [(buffer.upper - buffer.lower) * room for buffer, room in zip(piece.buffers, piece.rooms, strict=True)],
    }
    shaken = [
        tuple(-values[letter][buffer] * (1 + noise * (2 * generator.random() - 1)) for letter in letters)
        for buffer in range(len(piece.buffers))
    ]
    ranks = [0] * len(shaken)
    for rank, buffer in enumerate(sorted(range(len(shaken)), key=lambda buffer: (shaken[buffer], buffer))):
        ranks[buffer] = rank
    return ranks
