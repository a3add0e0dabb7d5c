"""The time-memory curve of a step as hand-written SVG."""

from __future__ import annotations

from collections.abc import Sequence

from memopt.budget import format_bytes
from memopt.memory.breakdown import scale_of
from memopt.report.svg import HEIGHT, WIDTH, round_up
from memopt.step_curve import CurvePoint

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 14, 40
_TICKS = 5


def curve_svg(curve: Sequence[CurvePoint], budget: int | None = None) -> str:
    """Time added (upwards) over bytes of the step (to the right), the chosen point, and the budget as a line.

    Args:
        curve: at least one point, with falling bytes.
        budget: bytes; drawn where it lies within the picture.
    """
    sizes, shares = [point.bytes for point in curve], [point.extra for point in curve]
    margin = max(sizes) - min(sizes) or max(max(sizes), 1)
    low, high = max(0.0, min(sizes) - margin * 0.05), max(sizes) + margin * 0.05
    top = max(*shares, 0.01) * 1.08

    def x(size: float) -> float:
        return _LEFT + (size - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def y(share: float) -> float:
        return HEIGHT - _BOTTOM - share / top * (HEIGHT - _TOP - _BOTTOM)

    def horizontal(share: float) -> str:
        return (
            f'<line class="grid" x1="{_LEFT}" y1="{y(share):.1f}" x2="{WIDTH - _RIGHT}" y2="{y(share):.1f}"/>'
            f'<text class="tick" x="{_LEFT - 6}" y="{y(share) + 4:.1f}" text-anchor="end">+{share * 100:.4g} %</text>'
        )

    def vertical(kind: str, size: float, label: str) -> str:
        return (
            f'<line class="{kind}" x1="{x(size):.1f}" y1="{_TOP}" x2="{x(size):.1f}" y2="{HEIGHT - _BOTTOM}"/>'
            f'<text class="tick" x="{x(size):.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{label}</text>'
        )

    distance = round_up(top / _TICKS)
    parts = [horizontal(number * distance) for number in range(int(top / distance) + 1)]
    unit, size, _, _ = scale_of(int(high))
    distance = round_up((high - low) / size / _TICKS)
    first, last = int(-(-low // (distance * size))), int(high // (distance * size))
    parts += [
        vertical("grid", number * distance * size, f"{number * distance:.6g} {unit}")
        for number in range(first, last + 1)
    ]
    end = f'x="{WIDTH - _RIGHT}" y="{HEIGHT - 6}" text-anchor="end"'
    parts.append(f'<text class="tick" {end}>bytes of the whole step, everything resident included</text>')
    line = " ".join(f"{x(point.bytes):.1f},{y(point.extra):.1f}" for point in curve)
    parts.append(f'<polyline class="after" points="{line}"/>')
    if budget is not None and low <= budget <= high:
        parts.append(vertical("budget", budget, ""))
    words = [f"time added over bytes of a step, from {format_bytes(min(sizes))} to {format_bytes(max(sizes))}"]
    for point in curve:
        kind, radius = ("chosen", 6) if point.chosen else ("point", 2)
        label = f"{format_bytes(point.bytes)}: {point.extra:+.1%}"
        parts.append(
            f'<circle class="{kind}" cx="{x(point.bytes):.1f}" cy="{y(point.extra):.1f}" r="{radius}">'
            f"<title>{label}</title></circle>"
        )
        words += [f"chosen: {label}"] if point.chosen else []
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{"; ".join(words)}">{"".join(parts)}</svg>'
