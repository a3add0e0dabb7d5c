"""The time-memory curve of a whole step: what each plan that was found would hold and take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """One plan of a step.

    Attributes:
        bytes: the predicted peak.
        seconds: the predicted time of forward and backward.
        extra: the time above that of the fastest plan, as a share of it.
        chosen: whether this is the plan that was taken.
    """

    bytes: int
    seconds: float
    extra: float
    chosen: bool = False


def step_curve(plans: Sequence[tuple[int, float]], finished: Mapping[int, int], chosen: int) -> tuple[CurvePoint, ...]:
    """Return the curve of some plans, falling in bytes and rising in seconds.

    Args:
        plans: bytes, as the solver counts them, and seconds of each plan.
        finished: by index of a plan, the bytes that its finished program really takes. Plans in between are corrected
            in proportion, and none is said to take less than the least of these.
        chosen: index of the plan that was taken; it stays on the curve, where needed in place of others.
    """
    offsets = {plans[index][0]: exact - plans[index][0] for index, exact in finished.items()}
    known = sorted(offsets)
    least, fastest = min(finished.values()), min(seconds for _, seconds in plans)
    points = []
    for index, (size, seconds) in enumerate(plans):
        corrected = size + round(float(np.interp(size, known, [offsets[at] for at in known])))
        extra = seconds / fastest - 1 if fastest > 0 else 0.0
        points.append(CurvePoint(finished.get(index, max(least, corrected)), seconds, extra, index == chosen))
    return monotone(points)


def monotone(points: Iterable[CurvePoint]) -> tuple[CurvePoint, ...]:
    """Drop points until bytes fall and seconds rise; of several that contradict each other the chosen one stays."""
    points = sorted(points, key=lambda point: (point.seconds, point.bytes))
    for taken in [point for point in points if point.chosen]:
        points = [p for p in points if p is taken or (p.bytes - taken.bytes) * (p.seconds - taken.seconds) < 0]
    kept: list[CurvePoint] = []
    for point in points:
        if not kept or point.bytes < kept[-1].bytes:
            kept.append(point)
    return tuple(kept)
