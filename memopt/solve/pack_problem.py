"""Buffers to be placed, as plain numbers: scaled, cut into pieces that share no moment, and bounded from below."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

# Every offset and twice it can then be counted in 64 bits.
_MOST = 1 << 60


class Buffer(NamedTuple):
    """Bytes that must lie somewhere in the arena for a while.

    Attributes:
        lower: first moment of life.
        upper: the moment after the last; equal to `lower` for a buffer that is never live.
        size: bytes.
        alignment: its offset in bytes must be a multiple of this.
    """

    lower: int
    upper: int
    size: int
    alignment: int = 1


def refuse_malformed(buffers: Sequence[Buffer]) -> None:
    """Accept whole numbers that make sense.

    Raises:
        TypeError: a field is no int.
        ValueError: an interval ends before it starts, a size is negative, an alignment is below 1, or all of them
            together could not be counted in 64 bits.
    """
    for index, buffer in enumerate(buffers):
        for name, value in zip(buffer._fields, buffer, strict=True):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"buffer {index}: {name} must be an int, not {value!r}")
        if buffer.upper < buffer.lower:
            raise ValueError(f"buffer {index}: upper {buffer.upper} is before lower {buffer.lower}")
        if buffer.size < 0:
            raise ValueError(f"buffer {index}: size {buffer.size} is negative")
        if buffer.alignment < 1:
            raise ValueError(f"buffer {index}: alignment {buffer.alignment} is below 1")
    if sum(buffer.size + buffer.alignment for buffer in buffers) > _MOST:
        raise ValueError(f"sizes and alignments add up to more than {_MOST} bytes")


@dataclasses.dataclass(frozen=True)
class Piece:
    """Buffers whose lives form one connected stretch of time; nothing outside it ever meets them.

    Sizes are in units of `unit` bytes, so that every offset worth trying is a whole number of units. Whatever lies
    above a buffer starts at a multiple of what the alignments around it share: its room is counted up to there.

    Attributes:
        members: indices into the caller's list.
        buffers: what they say; sizes are positive and lives are not empty.
        unit: bytes.
        rooms: units that each buffer takes from whatever lies above it.
        alignments: units.
        first: the first section of each buffer's life.
        last: the section after its last.
        sections: for each maximal set of buffers that live at one time, in order of time, its buffers.
    """

    members: tuple[int, ...]
    buffers: tuple[Buffer, ...]
    unit: int
    rooms: tuple[int, ...]
    alignments: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    sections: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def loads(self) -> tuple[int, ...]:
        """Units that the buffers of each section take together."""
        return tuple(sum(self.rooms[buffer] for buffer in section) for section in self.sections)

    @functools.cached_property
    def spare(self) -> tuple[int, ...]:
        """Bytes that the topmost buffer of each section may leave unused at its end, at most."""
        rest = [room * self.unit - buffer.size for room, buffer in zip(self.rooms, self.buffers, strict=True)]
        return tuple(max(rest[buffer] for buffer in section) for section in self.sections)

    @property
    def meetings(self) -> int:
        """How many pairs of buffers live at some time together."""
        starts = sorted(self.first)
        later = (bisect.bisect_left(starts, last) for last in self.last)
        return sum(later) - len(starts) * (len(starts) + 1) // 2

    @functools.cached_property
    def neighbours(self) -> tuple[tuple[int, ...], ...]:
        """For each buffer those that live at some time with it, in order."""
        met: list[set[int]] = [set() for _ in self.buffers]
        for section in self.sections:
            for buffer in section:
                met[buffer].update(section)
        return tuple(tuple(sorted(others - {buffer})) for buffer, others in enumerate(met))

    @functools.cached_property
    def twins(self) -> tuple[tuple[int, ...], ...]:
        """For each buffer the others that are equal to it in everything."""
        equal: dict[Buffer, list[int]] = {}
        for index, buffer in enumerate(self.buffers):
            equal.setdefault(buffer, []).append(index)
        return tuple(
            tuple(other for other in equal[buffer] if other != index) for index, buffer in enumerate(self.buffers)
        )

    @functools.cached_property
    def lower_bound(self) -> int:
        """Bytes that no packing of the piece can do without."""
        return max(load * self.unit - spare for load, spare in zip(self.loads, self.spare, strict=True))

    def size(self, offsets: Sequence[int]) -> int:
        """Bytes up to the highest end, where `offsets` are in units."""
        return max(offset * self.unit + buffer.size for offset, buffer in zip(offsets, self.buffers, strict=True))

    def next_size(self, size: int) -> int:
        """The least size in bytes above `size` that a packing of whole units can have."""
        return min(size + 1 + (buffer.size - size - 1) % self.unit for buffer in self.buffers)


def pieces(buffers: Sequence[Buffer]) -> list[Piece]:
    """Cut the buffers that take room at some time into pieces; in order of time."""
    found: list[Piece] = []
    current: list[int] = []
    end = None
    for index in sorted(range(len(buffers)), key=lambda index: (buffers[index].lower, index)):
        buffer = buffers[index]
        if not buffer.size or buffer.lower == buffer.upper:
            continue
        if end is not None and buffer.lower >= end:
            found.append(_piece(buffers, current))
            current, end = [], None
        current.append(index)
        end = buffer.upper if end is None else max(end, buffer.upper)
    return [*found, _piece(buffers, current)] if current else found


def _piece(buffers: Sequence[Buffer], members: list[int]) -> Piece:
    held = tuple(buffers[index] for index in members)
    sections = _sections(held)
    first, last = [0] * len(held), [0] * len(held)
    common = [buffer.alignment for buffer in held]
    for number, section in reversed(list(enumerate(sections))):
        for buffer in section:
            first[buffer] = number
            last[buffer] = last[buffer] or number + 1
        shared = math.gcd(*(held[buffer].alignment for buffer in section))
        for buffer in section:
            common[buffer] = math.gcd(common[buffer], shared)
    rooms = [-(-buffer.size // step) * step for buffer, step in zip(held, common, strict=True)]
    unit = _unit(rooms, {buffer.alignment for buffer in held})
    return Piece(
        members=tuple(members),
        buffers=held,
        unit=unit,
        rooms=tuple(room // unit for room in rooms),
        alignments=tuple(max(1, buffer.alignment // unit) for buffer in held),
        first=tuple(first),
        last=tuple(last),
        sections=sections,
    )


def _unit(rooms: list[int], alignments: set[int]) -> int:
    """The largest unit of which every room is a multiple, and that each alignment divides or is a multiple of."""
    unit = math.gcd(*rooms)
    while True:
        finer = math.gcd(unit, *(alignment for alignment in alignments if unit % alignment))
        if finer == unit:
            return unit
        unit = finer


def _sections(held: tuple[Buffer, ...]) -> tuple[tuple[int, ...], ...]:
    events = sorted(
        [(buffer.upper, 0, index) for index, buffer in enumerate(held)]
        + [(buffer.lower, 1, index) for index, buffer in enumerate(held)]
    )
    alive: dict[int, None] = {}
    found, grown = [], False
    for _, starts, index in events:
        if starts:
            alive[index] = None
        else:
            if grown:
                found.append(tuple(sorted(alive)))
            del alive[index]
        grown = bool(starts)
    return tuple(found)
