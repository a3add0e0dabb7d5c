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
