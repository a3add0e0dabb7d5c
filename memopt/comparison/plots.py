"""Plots of a comparison as hand-written SVG: bars per row, and time over memory."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from memopt.comparison.record import Row

_WIDTH, _LEFT, _RIGHT = 880, 190, 120
_BAR, _GAP = 18, 8
_HEIGHT, _TOP, _BOTTOM = 320, 14, 44
_TICKS = 5
_LINE, _LETTER = 13, 8  # a name's height and, about, width per letter


def bars_svg(
    rows: Sequence[Row], value: Callable[[Row], float | None], words: Callable[[float], str], title: str
) -> str:
    """One horizontal bar per row from zero, its figure beside it; a row without one says why, or "not known".

    Args:
        rows: at least one.
        value: the figure; None where there is none.
        words: the figure in words.
        title: what the bars show.
    """
    known = [(row, value(row)) for row in rows]
    top = max((size for _, size in known if size is not None), default=0.0) or 1.0
    height = len(rows) * (_BAR + _GAP) + _GAP
    parts = []
    for index, (row, size) in enumerate(known):
        y = _GAP + index * (_BAR + _GAP)
        middle = y + _BAR / 2 + 4
        name = html.escape(row.name, quote=True)
        parts.append(f'<text class="name" x="{_LEFT - 8}" y="{middle:.0f}" text-anchor="end">{name}</text>')
        if size is None:
            reason = html.escape(_short(row.reason or "not known"), quote=True)
            parts.append(f'<text class="why" x="{_LEFT + 4}" y="{middle:.0f}">{reason}</text>')
            continue
        length = size / top * (_WIDTH - _LEFT - _RIGHT)
        kind = "peer" if row.is_peer else "own"
        parts.append(f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR}" rx="2"/>')
        parts.append(
            f'<text class="figure" x="{_LEFT + length + 6:.1f}" y="{middle:.0f}">{html.escape(words(size))}</text>'
        )
    label = html.escape(title, quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def scatter_svg(
    rows: Sequence[Row],
    across: Callable[[Row], float | None],
    up: Callable[[Row], float | None],
    words: tuple[Callable[[float], str], Callable[[float], str]],
    title: str,
) -> str:
    """One dot per row that has both figures; the rows of one engine at several settings are joined by a line.

    Args:
        rows: at least one with both figures.
        across, up: the figures of the two axes, which begin at zero.
        words: the figures of the axes in words.
        title: what is shown.
    """
    points = [(row, x, y) for row in rows if (x := across(row)) is not None and (y := up(row)) is not None]
    right, top = max(x for _, x, _ in points) * 1.06 or 1.0, max(y for _, _, y in points) * 1.06 or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            90 + x / right * (_WIDTH - 90 - _RIGHT),
            _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = []
    for limit, vertical in ((right, True), (top, False)):
        distance = round_up(limit / _TICKS)
        for number in range(int(limit / distance) + 1):
            text = html.escape(words[0 if vertical else 1](number * distance) if number else "0")
            x, y = at(number * distance, 0) if vertical else at(0, number * distance)
            if vertical:
                parts.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{y:.1f}"/>')
                parts.append(f'<text class="tick" x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{text}</text>')
            else:
                parts.append(f'<line class="grid" x1="{x:.1f}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>')
                parts.append(f'<text class="tick" x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    groups: dict[str, list[tuple[float, float]]] = {}
    for row, x, y in points:
        groups.setdefault(row.name.partition(":")[0], []).append(at(x, y))
    for name, dots in groups.items():
        kind = "peer" if Row(name).is_peer else "own"
        if len(dots) > 1:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(dots))
            parts.append(f'<polyline class="line {kind}" points="{line}"/>')
    spots = _apart([(*at(x, y), row.name) for row, x, y in points])
    for (row, across_value, up_value), (left, base) in zip(points, spots, strict=True):
        x, y = at(across_value, up_value)
        kind, name = "peer" if row.is_peer else "own", html.escape(row.name, quote=True)
        figures = html.escape(f"{words[0](across_value)}, {words[1](up_value)}")
        parts.append(
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{name}: {figures}</title></circle>'
            f'<text class="figure" x="{left:.1f}" y="{base:.1f}">{name}</text>'
        )
    label = html.escape(title, quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _apart(dots: Sequence[tuple[float, float, str]]) -> list[tuple[float, float]]:
    """Where each dot's name begins, so that no name lies on another: beside the dot, or as near as there is room."""
    found: list[tuple[float, float]] = []
    for x, y, _ in dots:
        steps = sorted(range(-len(dots), len(dots) + 1), key=abs)
        free = (y - 6 + step * _LINE for step in steps if _TOP < y - 6 + step * _LINE < _HEIGHT - _BOTTOM)
        taken = [
            other
            for (left, other), (_, _, name) in zip(found, dots, strict=False)
            if abs(left - x - 8) < _LETTER * max(len(name), 8)
        ]
        found.append((x + 8, next((base for base in free if all(abs(base - one) >= _LINE for one in taken)), y - 6)))
    return found


def _short(text: str) -> str:
    return text if len(text) <= 90 else f"{text[:90]}…"


def round_up(value: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below `value`, which must be positive: for axes."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))
