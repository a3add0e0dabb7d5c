"""Where a caching allocator is to be led to put each block, so that blocks lie as they were packed.

The allocator gives a request the smallest free block that is large enough, and cuts it off at that block's beginning,
where more than `SMALL` bytes are left; a request of no more than those has memory elsewhere. So all free memory of an
arena is held (`memopt.solve.steering`), but for the holes of the requests that come next: each is to find its own.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from memopt.solve.liveness import profile
from memopt.solve.pack import Buffer, pack

# Smaller requests have memory of their own, and so much is not cut off a block.
SMALL = 2**20
# Segments are multiples of this.
_SEGMENT = 2 * 2**20
_LEAST = 512  # sizes of blocks are multiples of this
# Blocks begin at multiples of one of these: what lies between two is nothing, or can be held. A block is given all of
# its last unit: what it does not need of it is too little to be cut off, or, in a larger unit, can be held.
UNITS = range(SMALL + _LEAST, 2 * SMALL + _LEAST, _LEAST)
# Where an arena is not this close to what is in use at once, but for two segments, it is packed again, for so many
# times as long, and then with further units, so many in all, that differ by so many bytes.
_CLOSE, _LONGER, _TRIED, _UNLIKE = 1.01, 4, 2, 2**16
# Packings until requests of the same line are not mistaken for each other.
_ROUNDS = 6
# Programs whose placements are remembered.
_KNOWN = 4


@dataclasses.dataclass(frozen=True)
class Block:
    """A request's block.

    Attributes:
        size: its bytes.
        born: the line of the program that asks for it.
        dies: the line that it is let go of in, or before the next one.
        until: the first request, by its place among all, that comes after it is let go of, where that is in the line
            that it is born in; else -1.
    """

    size: int
    born: int
    dies: int
    until: int = -1


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where blocks lie in an arena.

    Attributes:
        blocks: all of them, in the order in which they are asked for.
        offsets: in bytes from the arena's beginning; -1 for those that have memory of their own.
        holes: bytes that are left free for each before it is asked for.
        arena_bytes: the arena's size: its last unit, at least, stays free.
        unit: bytes of which offsets are multiples.
    """

    blocks: tuple[Block, ...]
    offsets: tuple[int, ...]
    holes: tuple[int, ...]
    arena_bytes: int
    unit: int


def most_bytes(blocks: Sequence[Block], *, small: bool = False) -> int:
    """The most bytes of the blocks that lie in an arena at once, or of the small ones that lie elsewhere."""
    spans = [(block.born, block.dies + 1, block.size) for block in blocks if (block.size <= SMALL) is small]
    return int(profile(max((stop for _, stop, _ in spans), default=0), spans).max(initial=0))


def place(blocks: Sequence[Block], timeout: float = 2.0, room: int | None = None) -> Placement | None:
    """Pack blocks into an arena; None where blocks of one line would take each other's place.

    Args:
        blocks: in the order in which they are asked for.
        timeout: seconds for each packing.
        room: bytes that there are: the first arena found that takes no more will do. By default a small one is wanted.
    """
    enough, best = _CLOSE * most_bytes(blocks) + 2 * _SEGMENT, None
    first, *others = _least_lossy(blocks)
    if room is not None:
        best = _placed(blocks, first, timeout, max(0, room // _SEGMENT * _SEGMENT - first))
        if best is not None and best.arena_bytes <= room:
            return best
    shortly = [(first, timeout)] if best is None else []
    for unit, seconds in (*shortly, (first, _LONGER * timeout), *((other, timeout) for other in others)):
        found = _placed(blocks, unit, seconds)
        if found is not None and (best is None or found.arena_bytes < best.arena_bytes):
            best = found
        if best is not None and best.arena_bytes <= enough:
            break
    return best


class Placements:
    """Placements of the latest programs: the same blocks are not packed again in vain."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        # The latest last; beside each the room that it was asked for with.
        self._known: dict[tuple[Block, ...], tuple[Placement | None, int]] = {}

    def place(self, blocks: Sequence[Block], room: int) -> Placement | None:
        """As `place`, which it asks where what is known takes more than the room, and less was not looked for."""
        key = tuple(blocks)
        found, asked = self._known.pop(key, (None, -1))
        if asked < 0 or (found is not None and room < found.arena_bytes <= asked):
            found, asked = place(blocks, room=room), room
        self._known[key] = found, asked
        if len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]
        return found


def _placed(blocks: Sequence[Block], unit: int, timeout: float, capacity: int | None = None) -> Placement | None:
    large = [index for index, block in enumerate(blocks) if block.size > SMALL]
    holes = [_whole(block.size, unit) for block in blocks]
    apart: set[int] = set()  # with something held behind them
    for number in range(_ROUNDS):
        lives = [(blocks[index].born, blocks[index].dies + 1) for index in large]
        packing = pack(
            [Buffer(*life, room_of(holes[index], unit)) for life, index in zip(lives, large, strict=True)],
            capacity,
            timeout,
        )
        offsets = [-1] * len(blocks)
        for index, offset in zip(large, packing.offsets, strict=True):
            offsets[index] = offset
        found = Placement(tuple(blocks), tuple(offsets), tuple(holes), _rounded(packing.size + unit, _SEGMENT), unit)
        wrong = _mistaken(found)
        if not wrong:
            return found
        for line in wrong if number < _ROUNDS // 3 else _lines(found):  # each packing has others that touch
            for index in line:
                holes[index] = _uneven(_rounded(blocks[index].size, _LEAST), unit)
            if apart.issuperset(line):
                _tell_apart(blocks, line, holes, unit)
            apart.update(line)
    return None


def _least_lossy(blocks: Sequence[Block]) -> list[int]:
    """A few units with which the blocks take little at once, each all of its last unit; the least comes first."""
    sizes = {block.size: 0 for block in blocks if block.size > SMALL}
    for index, size in enumerate(sizes):
        sizes[size] = index
    if not sizes:
        return [UNITS[0]]
    lines: dict[int, int] = {}
    for line in sorted({line for block in blocks for line in (block.born, block.dies + 1)}):
        lines[line] = len(lines)
    alive = np.zeros((len(lines), len(sizes)))  # blocks of each size, by line
    for block in blocks:
        if block.size > SMALL:
            alive[lines[block.born], sizes[block.size]] += 1
            alive[lines[block.dies + 1], sizes[block.size]] -= 1
    alive = np.unique(alive.cumsum(axis=0), axis=0)
    units = np.array(UNITS)
    taken = -(-np.array(list(sizes))[:, None] // units) * units
    found: list[int] = []
    for index in (alive @ taken).max(axis=0).argsort(kind="stable"):
        if all(abs(int(units[index]) - other) >= _UNLIKE for other in found):
            found.append(int(units[index]))
        if len(found) == _TRIED:
            break
    return found


def _whole(size: int, unit: int) -> int:
    """The hole of a block: all of its last unit, or just itself where what it leaves of that would be cut off."""
    hole, least = _rounded(size, unit), _rounded(size, _LEAST)
    return hole if hole - least <= SMALL else least


def _tell_apart(blocks: Sequence[Block], line: Sequence[int], holes: list[int], unit: int) -> None:
    """Have requests of a line that are equal find their own holes: each takes the smallest that is free then.

    A hole of one that is let go of before the line ends is free again for the next. What comes to lie in a hole last
    is the one that it belongs to.
    """
    least = 0
    for size, same in itertools.groupby(sorted(line, key=lambda index: (holes[index], index)), lambda i: holes[i]):
        group, free, made = list(same), list[int](), 0
        slots: dict[int, int] = {}
        last: dict[int, int] = {}
        for place_, index in enumerate(group):
            for earlier in group[:place_]:
                if last.get(slots[earlier]) == earlier and 0 <= blocks[earlier].until <= index:
                    bisect.insort(free, slots[earlier])
                    last[slots[earlier]] = -1
            slots[index] = free.pop(0) if free else made
            made += slots[index] == made
            last[slots[index]] = index
        owners = {slots[index]: index for index in group}
        rest = [index for index in group if owners[slots[index]] != index]
        least = max(least, size)
        for index in [*(owners[slot] for slot in range(made)), *rest]:
            holes[index], least = least, _uneven(least + _LEAST, unit)


def _uneven(hole: int, unit: int) -> int:
    """A hole of at least so many bytes that something is held behind."""
    return hole if hole % unit else hole + _LEAST


def _mistaken(placement: Placement) -> list[list[int]]:
    """Lines whose requests, one after the other, do not all get the holes that are theirs: blocks of each."""
    return [line for line in _lines(placement) if not _each_finds_its_own(placement, line)]


def _lines(placement: Placement) -> list[list[int]]:
    """The blocks of each line that asks for several."""
    placed = (index for index, offset in enumerate(placement.offsets) if offset >= 0)
    lines = [list(group) for _, group in itertools.groupby(placed, key=lambda index: placement.blocks[index].born)]
    return [line for line in lines if len(line) > 1]


def _each_finds_its_own(placement: Placement, line: Sequence[int]) -> bool:
    """Whether each block of a line that outlives it is given its own hole, all of it."""
    blocks, whole = placement.blocks, placement.holes
    free = runs_of([(placement.offsets[index], whole[index]) for index in line])
    taken: dict[int, tuple[int, int]] = {}
    for index in line:
        gone = [earlier for earlier in taken if 0 <= blocks[earlier].until <= index]
        free = runs_of([*free, *(taken.pop(earlier) for earlier in gone)])
        size, start = min(((size, start) for start, size in free if size >= blocks[index].size), default=(0, -1))
        if start < 0:
            return False
        free.remove((start, size))
        used = _rounded(blocks[index].size, _LEAST)
        if size - used > SMALL:
            free.append((start + used, size - used))
        else:
            used = size
        if blocks[index].dies > blocks[index].born and (start, used) != (placement.offsets[index], whole[index]):
            return False
        taken[index] = start, used
    return True


def room_of(hole: int, unit: int) -> int:
    """Bytes that a hole has to itself: what is left of them behind it is nothing, or can be held."""
    room = _rounded(hole, unit)
    return room if room == hole or room - hole > SMALL else room + unit


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def runs_of(pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pieces of memory as (offset, bytes), those that touch as one."""
    runs: list[tuple[int, int]] = []
    for offset, size in sorted(pieces):
        if runs and sum(runs[-1]) == offset:
            runs[-1] = runs[-1][0], runs[-1][1] + size
        else:
            runs.append((offset, size))
    return runs
