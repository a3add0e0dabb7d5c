"""The time-memory curve as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from memopt.budget import format_bytes
from memopt.memory.breakdown import align
from memopt.step.curve import CurvePoint

_ROWS = 12


def curve_table(curve: Sequence[CurvePoint]) -> list[str]:
    """A heading and at most twelve points, evenly spaced in bytes, the chosen one marked with an arrow."""
    rows = [("", "peak of the step", "time", "added")]
    for point in even_points(curve, _ROWS):
        mark = "→" if point.chosen else ""
        rows.append((mark, format_bytes(point.bytes), format_seconds(point.seconds), f"{point.extra:+.1%}"))
    return align(rows)


def even_points(curve: Sequence[CurvePoint], most: int) -> list[CurvePoint]:
    """At most `most` (> 2) points: the first, the last, the chosen, and those nearest to even steps of bytes."""
    if len(curve) <= most:
        return list(curve)
    high, low = curve[0].bytes, curve[-1].bytes
    wanted = [high - (high - low) * number // (most - 2) for number in range(most - 1)]
    nearest = {min(range(len(curve)), key=lambda at: abs(curve[at].bytes - size)) for size in wanted}
    nearest.update(at for at, point in enumerate(curve) if point.chosen)
    return [curve[at] for at in sorted(nearest)]


def format_seconds(seconds: float) -> str:
    """A time in the unit that reads well, to three or four digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.{0 if seconds >= 100 * size else 2}f} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0 s"
