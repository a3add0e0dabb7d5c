"""Made-up buffers for the tests of packing, and the least arena by trying every order."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from memopt.solve.pack import Buffer


def least_size(buffers: list[Buffer]) -> int:
    """The size of the smallest arena: in some order, each at the lowest free offset above those it meets, is best."""
    best = None
    for order in itertools.permutations(range(len(buffers))):
        offsets: dict[int, int] = {}
        for index in order:
            buffer = buffers[index]
            floor = 0
            for other, offset in offsets.items():
                met = buffers[other].lower < buffer.upper and buffer.lower < buffers[other].upper
                if met and min(buffer.size, buffers[other].size, buffer.upper - buffer.lower) > 0:
                    floor = max(floor, offset + buffers[other].size)
            offsets[index] = -(-floor // buffer.alignment) * buffer.alignment
        size = max(offsets[index] + buffers[index].size for index in order) if order else 0
        best = size if best is None else min(best, size)
    return best or 0


# Lists whose least arena is above the fullest moment: 6 over 5, 5 over 4, 7 over 6 (by `fits`).
GAPPED = (
    [Buffer(*b) for b in ((9, 10, 3), (8, 10, 2), (4, 9, 2), (4, 8, 1), (2, 5, 2), (6, 9, 1), (0, 3, 3))],
    [Buffer(*b) for b in ((8, 9, 3), (7, 8, 2), (2, 4, 3), (5, 6, 2), (6, 9, 1), (0, 7, 1), (5, 8, 1), (6, 7, 1))],
    [
        Buffer(*b)
        for b in ((4, 6, 2), (3, 5, 1), (0, 1, 2), (1, 5, 3), (0, 3, 2), (5, 6, 2), (1, 4, 1), (0, 1, 2), (5, 6, 2))
    ],
)


def fits(buffers: list[Buffer], capacity: int) -> bool:
    """Whether some choice of offsets keeps the capacity: every one is tried."""
    offsets: list[int] = []

    def go_on() -> bool:
        if len(offsets) == len(buffers):
            return True
        buffer = buffers[len(offsets)]
        for offset in range(0, capacity - buffer.size + 1, buffer.alignment):
            if not any(
                other.lower < buffer.upper
                and buffer.lower < other.upper
                and at < offset + buffer.size
                and offset < at + other.size
                for other, at in zip(buffers, offsets, strict=False)
            ):
                offsets.append(offset)
                if go_on():
                    return True
                offsets.pop()
        return False

    return go_on()


@st.composite
def gapped_lists(draw: st.DrawFn) -> list[Buffer]:
    """Lists near those of `GAPPED`: a size, an end or an alignment changed here and there."""
    buffers = list(draw(st.sampled_from(GAPPED)))
    for index in draw(st.lists(st.integers(0, len(buffers) - 1), max_size=2)):
        lower, upper, size, _ = buffers[index]
        change = draw(st.integers(-1, 1))
        upper = max(lower + 1, upper + draw(st.integers(-1, 1)))
        buffers[index] = Buffer(lower, upper, max(1, size + change), draw(st.sampled_from([1, 1, 2])))
    return buffers


@st.composite
def buffer_lists(draw: st.DrawFn, most: int = 6, alignments: tuple[int, ...] = (1,)) -> list[Buffer]:
    """A few buffers with short lives; some take no room, some are never live."""
    found = []
    for _ in range(draw(st.integers(0, most))):
        lower = draw(st.integers(-2, 7))
        upper = lower + draw(st.integers(0, 5))
        found.append(Buffer(lower, upper, draw(st.integers(0, 9)), draw(st.sampled_from(alignments))))
    return found


@st.composite
def crowded_lists(draw: st.DrawFn, most: int = 7, alignments: tuple[int, ...] = (1,)) -> list[Buffer]:
    """Buffers that all take room, many of them at one time; some of them equal."""
    found: list[Buffer] = []
    for _ in range(draw(st.integers(3, most))):
        if found and draw(st.integers(0, 4)) == 0:
            found.append(draw(st.sampled_from(found)))
            continue
        lower = draw(st.integers(0, 5))
        upper = draw(st.integers(lower + 1, 7))
        found.append(Buffer(lower, upper, draw(st.integers(1, 12)), draw(st.sampled_from(alignments))))
    return found
