"""An independent judge of packings: compares every two buffers that meet, sharing no code with the solver."""

from __future__ import annotations

from collections.abc import Sequence


class PackingError(ValueError):
    """A packing that is not one; the message names the buffers."""


def check_packing(
    buffers: Sequence[tuple[int, ...]], offsets: Sequence[int], size: int, capacity: int | None = None
) -> None:
    """Accept offsets at which no two buffers share a byte at any time, and that end at exactly `size` bytes.

    Buffers are (lower, upper, size) or (lower, upper, size, alignment), lives half-open, sizes and offsets in bytes.

    Raises:
        PackingError: a missing, negative or misaligned offset, two buffers in one place at one time, or a size that is
            not as claimed or over `capacity` bytes.
    """
    if len(offsets) != len(buffers):
        raise PackingError(f"{len(offsets)} offsets for {len(buffers)} buffers")
    for index, (buffer, offset) in enumerate(zip(buffers, offsets, strict=True)):
        if offset < 0 or offset % (buffer[3] if len(buffer) > 3 else 1):
            raise PackingError(f"buffer {index} lies at {offset}, which is negative or misaligned")
    alive: list[int] = []
    for index in sorted(range(len(buffers)), key=lambda index: buffers[index][0]):
        lower, upper, length = buffers[index][:3]
        if lower == upper or not length:
            continue
        alive = [other for other in alive if buffers[other][1] > lower]
        for other in alive:
            if offsets[index] < offsets[other] + buffers[other][2] and offsets[other] < offsets[index] + length:
                raise PackingError(f"buffers {min(index, other)} and {max(index, other)} share bytes at time {lower}")
        alive.append(index)
    end = max((offset + buffer[2] for buffer, offset in zip(buffers, offsets, strict=True)), default=0)
    if end != size:
        raise PackingError(f"the packing ends at {end} bytes, not at {size} as claimed")
    if capacity is not None and end > capacity:
        raise PackingError(f"the packing of {end} bytes is over the capacity of {capacity} bytes")
