"""Which calls of modules to checkpoint: of nested calls one, so that a step's peak falls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Nested:
    """A call that lies within another one, or within none.

    Attributes:
        parent: the number of the call that it lies in, which is lower than its own; None for none.
        gain: bytes that are not saved for backward if it is checkpointed; none or less where it may not be.
        recomputed: bytes that are there while backward goes through it, recomputed.
    """

    parent: int | None
    gain: int
    recomputed: int


def choices(calls: Sequence[Nested], times: int, most: int) -> list[list[int]]:
    """Sets of calls of which none lies in another one, the lowest expected peak first.

    Each has the outermost calls that recompute no more than some bytes.

    Args:
        calls: in the order in which they begin.
        times: how often all of them run before backward.
        most: sets that are wanted.
    """
    found: dict[tuple[int, ...], int] = {}
    for limit in sorted({call.recomputed for call in calls if call.gain > 0}):
        chosen = _outermost(calls, limit)
        gained = times * sum(calls[index].gain for index in chosen)
        found[tuple(chosen)] = max(calls[index].recomputed for index in chosen) - gained
    return [list(chosen) for chosen in sorted(found, key=lambda chosen: (found[chosen], len(chosen)))][:most]


def _outermost(calls: Sequence[Nested], limit: int) -> list[int]:
    chosen: list[int] = []
    covered: set[int] = set()
    for index, call in enumerate(calls):
        if call.parent in covered:
            covered.add(index)
        elif call.gain > 0 and call.recomputed <= limit:
            chosen.append(index)
            covered.add(index)
    return chosen
