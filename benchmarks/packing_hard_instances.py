"""Two hundred lists of buffers that fill an arena of a known size, made so that a packing of each is known.

Each kind cuts or fills a rectangle of bytes by moments, so that the places of the buffers are known; then it forgets
them. Most moments are full, long lives cross many short ones, and few sizes are equal.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

from memopt.solve.pack_problem import Buffer

CAPACITY = 1 << 20

_Part = tuple[int, int, int, int]  # first moment, the one after the last, first unit, the one after the last


@dataclasses.dataclass(frozen=True)
class Instance:
    """A list of buffers and one packing of it.

    Attributes:
        name: the kind and the seed.
        buffers: shuffled.
        offsets: bytes, at which they fit into `capacity`.
        capacity: bytes.
    """

    name: str
    buffers: tuple[Buffer, ...]
    offsets: tuple[int, ...]
    capacity: int


def guillotine(generator: random.Random, count: int, rows: int) -> list[_Part]:
    """Cut across or along, again and again, the larger parts first; every moment is full."""
    return _cut(generator, count, rows, pinwheels=0.0, across=generator.uniform(0.3, 0.6))


def pinwheel(generator: random.Random, count: int, rows: int) -> list[_Part]:
    """Cut most parts into four around a fifth, which no straight cut divides; every moment is full."""
    return _cut(generator, count, rows, pinwheels=0.6, across=0.45)


def bands(generator: random.Random, count: int, rows: int) -> list[_Part]:
    """Long lives at random heights; between them short ones, and every moment is full."""
    moments = 2 * count
    parts = [(0, moments, 0, rows)]
    for _ in range(count // 12):
        parts = _split(generator, parts, across=0.75)
    long = [part for part in parts if part[1] - part[0] > moments // 3]
    kept = set(generator.sample(long, len(long) // 2))
    rest = [part for part in parts if part not in kept]
    while rest and len(rest) + len(kept) < count:
        rest = _split(generator, rest, across=0.25)
    return [*kept, *rest]


def shortened(generator: random.Random, count: int, rows: int) -> list[_Part]:
    """As `pinwheel`, with the lives of a quarter cut short and some sizes made smaller: few moments are full."""
    parts = _cut(generator, count, rows, pinwheels=0.3, across=0.4)
    share = generator.choice((0.02, 0.05, 0.1, 0.25))
    found = []
    for lower, upper, low, high in parts:
        if generator.random() < share:
            cut = generator.randint(0, (upper - lower) // 2)
            lower, upper = (lower + cut, upper) if generator.random() < 0.5 else (lower, upper - cut)
        if generator.random() < 0.05:
            high -= generator.randint(0, (high - low) // 4)
        found.append((lower, upper, low, high))
    return found


def network(generator: random.Random, count: int, rows: int) -> list[_Part]:
    """What a network's layers leave: outputs, a quarter of them read late, weights brought in ahead, scratch memory.

    They are placed by falling size, each at the lowest free place, and what does not fit is left out; then most are
    made larger, up to what lies above them, and short lives fill free room, so that many moments are full.
    """
    layers = count // 2
    wanted: list[tuple[int, int, int]] = []  # size, first moment, the one after the last
    for layer in range(layers):
        size = max(1, int(rows * 2 ** generator.uniform(-8, -2.5)))
        far = generator.random() < 0.25
        end = layer + generator.choice((2, 2, 3, 4, 6, 8)) + (generator.randint(5, layers // 3) if far else 0)
        wanted.append((size // 3 + 1 if far else size, layer, min(end, layers + 1)))
        if generator.random() < 0.6:
            ahead = generator.randint(1, 6)
            wanted.append((max(1, int(rows * 2 ** generator.uniform(-9, -3))), max(0, layer - ahead), layer + 1))
        if generator.random() < 0.2:
            wanted.append((max(1, int(rows * 2 ** generator.uniform(-7, -3))), layer, layer + 1))
    wanted.sort(key=lambda one: -one[0] * generator.uniform(0.5, 2.0))
    found: list[_Part] = []
    for size, lower, upper in wanted:
        for low, high in _holes([part for part in found if part[0] < upper and lower < part[1]], rows):
            if high - low >= size and len(found) < count * 2 // 3:
                found.append((lower, upper, low, low + size))
                break
    for index in generator.sample(range(len(found)), len(found) * 9 // 10):
        lower, upper, low, high = found[index]
        above = [part[2] for part in found if part[0] < upper and lower < part[1] and part[2] >= high]
        found[index] = (lower, upper, low, min(above, default=rows))
    for _ in range(20 * count):
        lower = generator.randrange(layers)
        upper = min(lower + generator.choice((1, 2, 2, 3, 4, 6)), layers + 1)
        holes = _holes([part for part in found if part[0] < upper and lower < part[1]], rows)
        if holes and len(found) < count:
            found.append((lower, upper, *generator.choice(holes)))
    return found


KINDS: dict[str, Callable[[random.Random, int, int], list[_Part]]] = {
    kind.__name__: kind for kind in (guillotine, pinwheel, bands, shortened, network)
}


def instance(kind: str, seed: int) -> Instance:
    """The list of a kind and a seed: 120 to 420 buffers, sizes that are multiples of 1,024 or of 16 bytes."""
    generator = random.Random(f"{kind} {seed}")
    unit = generator.choice((1024, 1024, 16))
    count = generator.randint(120, 420)
    parts = KINDS[kind](generator, count, CAPACITY // unit)
    generator.shuffle(parts)
    return Instance(
        f"{kind} {seed}",
        tuple(Buffer(lower, upper, (high - low) * unit) for lower, upper, low, high in parts),
        tuple(low * unit for _, _, low, _ in parts),
        CAPACITY,
    )


def instances(count: int) -> Iterator[Instance]:
    """The first so many, the kinds in turn."""
    for number in range(count):
        seed, kind = divmod(number, len(KINDS))
        yield instance(list(KINDS)[kind], seed)


def _cut(generator: random.Random, count: int, rows: int, pinwheels: float, across: float) -> list[_Part]:
    parts = [(0, 2 * count, 0, rows)]
    while len(parts) < count:
        # The whole length of time is first cut across, so that the list does not fall apart in time.
        share = 1.0 if len(parts) < 2 else across
        parts = _split(generator, parts, share, pinwheels if len(parts) > 1 else 0.0)
    return parts


def _split(generator: random.Random, parts: list[_Part], across: float, pinwheels: float = 0.0) -> list[_Part]:
    """Cut one of the parts, of three drawn the largest."""
    drawn = generator.sample(range(len(parts)), min(3, len(parts)))
    chosen = max(drawn, key=lambda index: (parts[index][1] - parts[index][0]) * (parts[index][3] - parts[index][2]))
    lower, upper, low, high = parts[chosen]
    rest = [*parts[:chosen], *parts[chosen + 1 :]]
    if generator.random() < pinwheels and upper - lower > 3 and high - low > 3:
        a, b = sorted(generator.sample(range(lower + 1, upper), 2))
        c, d = sorted(generator.sample(range(low + 1, high), 2))
        if generator.random() < 0.5:
            around = [(lower, b, low, c), (b, upper, low, d), (a, upper, d, high), (lower, a, c, high)]
        else:
            around = [(a, upper, low, c), (lower, a, low, d), (lower, b, d, high), (b, upper, c, high)]
        return [*rest, *around, (a, b, c, d)]
    if generator.random() < across and high - low > 1:
        at = generator.randint(low + 1, high - 1)
        return [*rest, (lower, upper, low, at), (lower, upper, at, high)]
    if upper - lower > 1:
        at = generator.randint(lower + 1, upper - 1)
        return [*rest, (lower, at, low, high), (at, upper, low, high)]
    return [*rest, (lower, upper, low, high)]


def _holes(parts: list[_Part], rows: int) -> list[tuple[int, int]]:
    """What is free between parts that are alive at one moment."""
    found, end = [], 0
    for low, high in sorted(part[2:] for part in parts):
        if low > end:
            found.append((end, low))
        end = max(end, high)
    return [*found, (end, rows)] if end < rows else found
