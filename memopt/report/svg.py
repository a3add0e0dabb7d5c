"""The memory timeline of one program as hand-written SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from memopt.budget import format_bytes
from memopt.memory.breakdown import scale_of
from memopt.report.text import largest_of_groups

WIDTH, HEIGHT = 880, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 30
_POINTS = 400
_TICKS = 4


def timeline_svg(
    before: Sequence[int], after: Sequence[int], budget: int | None = None, forward_steps: int = 0, name: str = ""
) -> str:
    """Bytes on the device over the steps of a program: before the plan, after it, and the budget as a line.

    Args:
        before: bytes at each step without the plan; may be empty.
        after: bytes at each step of what is executed.
        budget: bytes; drawn only when given.
        forward_steps: how many leading steps of `after` are forward; 0 draws no boundary.
        name: said to screen readers.
    """
    steps = max(len(before), len(after), 1)
    top = max([*before, *after, budget or 0, 1]) * 1.08

    def x(step: float) -> float:
        return _LEFT + step / steps * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - value / top * (HEIGHT - _TOP - _BOTTOM)

    def staircase(values: Sequence[int]) -> list[str]:
        groups = largest_of_groups(values, _POINTS)
        width = len(values) / len(groups) if groups else 0.0
        points = []
        for index, value in enumerate(groups):
            points += [f"{x(index * width):.1f},{y(value):.1f}", f"{x((index + 1) * width):.1f},{y(value):.1f}"]
        return points

    parts = _axis(top, steps, y)
    if after:
        line = staircase(after)
        floor = f"{y(0):.1f}"
        parts.append(
            f'<polygon class="area" points="{x(0):.1f},{floor} {" ".join(line)} {x(len(after)):.1f},{floor}"/>'
        )
        parts.append(f'<polyline class="after" points="{" ".join(line)}"/>')
    if before:
        parts.append(f'<polyline class="before" points="{" ".join(staircase(before))}"/>')
    if budget is not None:
        parts.append(_horizontal("budget", y(budget)))
    if 0 < forward_steps < len(after):
        at = f"{x(forward_steps):.1f}"
        parts.append(f'<line class="boundary" x1="{at}" y1="{_TOP}" x2="{at}" y2="{y(0):.1f}"/>')
        parts.append(f'<text class="tick" x="{at}" y="{_TOP + 10}" dx="-5" text-anchor="end">forward</text>')
        parts.append(f'<text class="tick" x="{at}" y="{_TOP + 10}" dx="5">backward</text>')
    label = html.escape(f"memory timeline of {name}: at most {format_bytes(max(after, default=0))}", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _axis(top: float, steps: int, y: Callable[[float], float]) -> list[str]:
    """Horizontal grid lines at round values, labelled in one unit, and the number of steps."""
    unit, size, _, _ = scale_of(int(top))
    distance = round_up(top / size / _TICKS)
    parts = []
    for number in range(int(top / size / distance) + 1):
        value = number * distance
        height = y(value * size)
        parts.append(_horizontal("grid", height))
        parts.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{value:g} {unit}</text>'
        )
    parts.append(
        f'<text class="tick" x="{WIDTH - _RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{steps} steps, in order</text>'
    )
    return parts


def round_up(value: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))


def _horizontal(kind: str, height: float) -> str:
    return f'<line class="{kind}" x1="{_LEFT}" y1="{height:.1f}" x2="{WIDTH - _RIGHT}" y2="{height:.1f}"/>'
