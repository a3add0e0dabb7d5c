"""A buffer plan as hand-written SVG: time from left to right, addresses of the arena from bottom to top."""

from __future__ import annotations

import html

from memopt.budget import format_bytes
from memopt.memory.buffers import Block, BufferPlan, Home

WIDTH, HEIGHT = 960, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 12, 12, 34
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#444}rect{stroke:#fff;stroke-width:.4}"
    ".value{fill:#4c78a8}.shared{fill:#54a24b}.scratch{fill:#e45756}.bound{stroke:#222;stroke-dasharray:5 4}"
)


def arena_svg(plan: BufferPlan) -> str:
    """Draw the arena: one rectangle per block, over its steps and its addresses; the lower bound as a dashed line.

    Blocks that hold several values (avoided concatenations, results in place) and scratch memory have colours of their
    own; each rectangle says on hover what it is. What lies outside of the arena is not drawn.
    """
    steps, top = max(1, len(plan.steps)), max(1, plan.arena_bytes)

    def x(step: float) -> float:
        return _LEFT + step / steps * (WIDTH - _LEFT - _RIGHT)

    def y(address: float) -> float:
        return HEIGHT - _BOTTOM - address / top * (HEIGHT - _TOP - _BOTTOM)

    parts = []
    for block in plan.blocks:
        if block.home is Home.ARENA and block.nbytes:
            corner = f'x="{x(block.start):.2f}" y="{y(block.offset + block.nbytes):.2f}"'
            width, height = x(block.end) - x(block.start), y(0) - y(block.nbytes)
            size = f'width="{width:.2f}" height="{height:.2f}"'
            parts.append(f'<rect class="{_kind(block)}" {corner} {size}><title>{_title(block)}</title></rect>')
    bound = f"{y(plan.lower_bound):.2f}"
    parts.append(f'<line class="bound" x1="{_LEFT}" y1="{bound}" x2="{WIDTH - _RIGHT}" y2="{bound}"/>')
    for address in (0, plan.arena_bytes):
        label = format_bytes(address, short=True)
        parts.append(f'<text x="{_LEFT - 6}" y="{y(address) + 4:.2f}" text-anchor="end">{label}</text>')
    below = f"{len(plan.steps)} operations, in order; at least {format_bytes(plan.lower_bound, short=True)}"
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 10}" text-anchor="end">{below}</text>')
    label = html.escape(f"arena of {format_bytes(plan.arena_bytes)}: time by address", quote=True)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    return f"{head}<style>{_STYLE}</style>{''.join(parts)}</svg>\n"


def _kind(block: Block) -> str:
    if block.scratch:
        return "scratch"
    return "shared" if len(block.holds) > 1 else "value"


def _title(block: Block) -> str:
    what = f"scratch of {block.name}" if block.scratch else ", ".join(block.holds)
    where = f"{format_bytes(block.nbytes, short=True)} at {block.offset}, operations {block.start} to {block.end - 1}"
    return html.escape(f"{what}: {where}", quote=True)
