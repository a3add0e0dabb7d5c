"""Made-up buffers whose least arena is known: a rectangle of bytes by time, cut apart."""

from __future__ import annotations

import random

from memopt.solve.pack_problem import Buffer

_Part = tuple[int, int, int, int]  # first moment, the one after the last, first byte, the one after the last


def cut_rectangle(
    count: int, moments: int, capacity: int, unit: int, seed: int, *, across: float = 0.4, shorten: float = 0.0
) -> list[Buffer]:
    """Cut `capacity` bytes over `moments` moments into `count` buffers at random, and shuffle them.

    They fit in `capacity` bytes by construction, and in no less where every life is kept.

    Args:
        count: how many buffers.
        moments: the length of time.
        capacity: bytes.
        unit: every size is a multiple of this many bytes.
        seed: of the random choices.
        across: the share of cuts that split bytes; the others split a life in two.
        shorten: the share of buffers whose life is shortened afterwards, by up to a half.
    """
    generator = random.Random(seed)
    parts: list[_Part] = [(0, moments, 0, capacity // unit)]
    while len(parts) < count:
        drawn = generator.sample(range(len(parts)), min(3, len(parts)))
        lower, upper, low, high = parts.pop(max(drawn, key=lambda index: _area(parts[index])))
        # The whole length of time is first cut across, so that the instance does not fall apart in time.
        if (generator.random() < across or len(parts) < 2) and high - low > 1:
            at = generator.randint(low + 1, high - 1)
            parts += [(lower, upper, low, at), (lower, upper, at, high)]
        elif upper - lower > 1:
            at = generator.randint(lower + 1, upper - 1)
            parts += [(lower, at, low, high), (at, upper, low, high)]
        else:
            parts.append((lower, upper, low, high))
    buffers = [_shortened(part, unit, generator, shorten) for part in parts]
    generator.shuffle(buffers)
    return buffers


def _area(part: _Part) -> int:
    return (part[1] - part[0]) * (part[3] - part[2])


def _shortened(part: _Part, unit: int, generator: random.Random, shorten: float) -> Buffer:
    lower, upper, low, high = part
    if generator.random() < shorten:
        cut = generator.randint(0, (upper - lower) // 2)
        if generator.random() < 0.5:
            lower += cut
        else:
            upper -= cut
    return Buffer(lower, upper, (high - low) * unit)
