"""Which values wait in the host's memory between forward and backward, and when they travel there and back.

One link carries one value at a time each way, in the order in which copies begin. A value leaves as soon as it is made
and the link is free, and its memory is free where it has arrived; it comes back as late as it can. Values are taken in
the order in which they are made: those wait longest, and the link is never idle for the sake of a later one.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

# A copy is given so many times its time: what computes beside it makes it slower, and times are predictions.
_MARGIN = 1.2
# What comes back in the first part of backward, by its share of the time, is there again while memory is short.
_SOON = 0.1


@dataclasses.dataclass(frozen=True)
class Value:
    """A value that forward makes and backward reads.

    Attributes:
        size: bytes.
        made: the operation of forward that makes it.
        last: the last operation of forward that reads it, or makes it.
        needed: the place in backward where it has to be back.
    """

    size: int
    made: int
    last: int
    needed: int


@dataclasses.dataclass(frozen=True)
class Offload:
    """What may travel.

    Attributes:
        forward, backward: seconds of each operation, in order. Place i of a phase is before its operation i.
        leaving, coming: places in forward and backward where copies may begin, or be waited for; rising.
        to_host, from_host: bytes per second of the link.
        values: what may wait.
        limit: the most bytes that may wait.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    leaving: Sequence[int]
    coming: Sequence[int]
    to_host: float
    from_host: float
    values: Sequence[Value]
    limit: int


@dataclasses.dataclass(frozen=True)
class Trip:
    """One value's way.

    Attributes:
        value: its place among the values.
        leaves: the place in forward where its copy begins.
        landed: the place in forward where that has ended, and nothing reads the value any more.
        returns: the place in backward where the copy back begins.
    """

    value: int
    leaves: int
    landed: int
    returns: int


def trips(problem: Offload, margin: float = _MARGIN) -> list[Trip]:
    """The ways of the values that can wait without anything waiting for them, in the order in which they leave.

    Args:
        problem: what may travel.
        margin: how many times its time a copy is given.
    """
    begins = [0.0, *itertools.accumulate(problem.forward)]
    chosen: list[Trip] = []
    free, room = 0.0, problem.limit
    for index in sorted(range(len(problem.values)), key=lambda index: (problem.values[index].made, index)):
        value = problem.values[index]
        leaves = _from(problem.leaving, value.made + 1)
        if value.size > room or leaves is None:
            continue
        ends = max(begins[leaves], free) + margin * value.size / problem.to_host
        # `begins` rises: the first place at or after which the copy is over.
        landed = _from(problem.leaving, max(value.last + 1, leaves + 1, bisect.bisect_left(begins, ends)))
        if landed is None:
            continue
        returns = _returns(problem, [*(trip.value for trip in chosen), index], margin)
        if returns is None:
            continue
        chosen = [dataclasses.replace(trip, returns=returns[trip.value]) for trip in chosen]
        chosen.append(Trip(index, leaves, landed, returns[index]))
        free, room = ends, room - value.size
    return chosen


def _returns(problem: Offload, indices: Sequence[int], margin: float) -> dict[int, int] | None:
    """Where the copies back of these values begin, each as late as it can; None where one would come too late."""
    begins = [0.0, *itertools.accumulate(problem.backward)]
    found: dict[int, int] = {}
    until, soonest = begins[-1], begins[-1] * _SOON
    for index in sorted(indices, key=lambda index: (problem.values[index].needed, index), reverse=True):
        value = problem.values[index]
        until = min(until, begins[value.needed]) - margin * value.size / problem.from_host
        place = bisect.bisect_right(begins, until) - 1  # the last that is not later
        place = bisect.bisect_right(problem.coming, min(place, value.needed - 1)) - 1
        if until < soonest or place < 0:
            return None
        found[index] = problem.coming[place]
    return found


def _from(places: Sequence[int], first: int) -> int | None:
    at = bisect.bisect_left(places, first)
    return places[at] if at < len(places) else None
