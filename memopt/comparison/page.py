"""A comparison as one self-contained HTML page: the table, and plots of time and memory."""

from __future__ import annotations

import html

from memopt.budget import format_bytes
from memopt.comparison.plots import bars_svg, scatter_svg
from memopt.comparison.record import Comparison, Row
from memopt.comparison.text import COLUMNS, filled_columns, row_cells, title
from memopt.report.curve_table import format_seconds

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #667085; --line: #dfe3ea; --page: #ffffff; --own: #2563eb;
  --peer: #98a2b3; --bad: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #323a48; --page: #14181f;
  --own: #6ea8fe; --peer: #667085; --bad: #f87171; } }
body { margin: 0 auto; max-width: 64rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p.sub, p.legend { color: var(--soft); margin: .2rem 0 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child, td.why { text-align: left; }
td.why { color: var(--soft); white-space: normal; } td.bad, p.bad { color: var(--bad); font-weight: 600; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 12px; }
svg .tick, svg .why { fill: var(--soft); font-size: 11px; } svg .grid { stroke: var(--line); }
svg .own { fill: var(--own); } svg .peer { fill: var(--peer); }
svg .line { fill: none; stroke-width: 1.5; } svg .line.own { stroke: var(--own); }
svg .line.peer { stroke: var(--peer); stroke-dasharray: 5 4; }
.k-own { color: var(--own); } .k-peer { color: var(--peer); }
"""


def to_html(comparison: Comparison) -> str:
    """The page; names and reasons are escaped, nothing is fetched, and there is no script."""
    parts = [
        f"<h1>{_text(comparison.model)}: engines side by side</h1>",
        f'<p class="sub">{_text(title(comparison))}</p>',
        _table(comparison.rows),
        '<p class="legend">'
        + " · ".join(
            f"<b>{_text(name)}</b> {_text(words)}"
            for name, words in (COLUMNS[index] for index in filled_columns(comparison.rows)[1:])
        )
        + "</p>",
    ]
    wrong = [row.name for row in comparison.rows if row.differs]
    if wrong:
        names = _text(", ".join(wrong))
        parts.append(f'<p class="bad">The numbers differ by more than rounding explains: {names}</p>')
    notes = [f"{row.name}: {note}" for row in comparison.rows for note in row.notes]
    parts += [f"<p>{_text(note)}</p>" for note in (*comparison.notes, *notes)]
    parts += _plots(comparison.rows)
    facts = {**comparison.settings, **comparison.versions}
    listed = ", ".join(f"{key} {value}" for key, value in facts.items() if value != "")
    parts.append(f"<h2>Settings and versions</h2><p>{_text(listed)}</p>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>memopt compare: {_text(comparison.model)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{chr(10).join(parts)}\n</body></html>\n"
    )


def _plots(rows: tuple[Row, ...]) -> list[str]:
    if not rows:
        return []
    legend = '<p class="legend"><b class="k-own">■ memopt</b> · <b class="k-peer">■ peers</b></p>'
    parts = ["<h2>Time of a step</h2>", legend, bars_svg(rows, _seconds, format_seconds, "time of a step per engine")]
    for heading, value in (("Memory allocated at most", _allocated), ("Memory of the whole process", _process)):
        if any(value(row) is not None for row in rows):
            parts += [f"<h2>{heading}</h2>", bars_svg(rows, value, _size, f"{heading.lower()} per engine")]
    memory = _allocated if sum(_allocated(row) is not None for row in rows) > 1 else _process
    if sum(memory(row) is not None and _seconds(row) is not None for row in rows) > 1:
        parts += [
            "<h2>Time over memory</h2>",
            scatter_svg(rows, memory, _seconds, (_size, format_seconds), "time of a step over memory, per engine"),
        ]
    return parts


def _seconds(row: Row) -> float | None:
    return row.median


def _allocated(row: Row) -> float | None:
    return row.allocated_bytes


def _process(row: Row) -> float | None:
    return row.process_bytes


def _size(value: float) -> str:
    return format_bytes(int(value), short=True)


def _table(rows: tuple[Row, ...]) -> str:
    kept = filled_columns(rows)
    head = "".join(f'<th title="{_text(COLUMNS[index][1])}">{_text(COLUMNS[index][0])}</th>' for index in kept)
    body = []
    for row in rows:
        if row.reason:
            span = max(1, len(kept) - 1)
            cells = f'<td>{_text(row.name)}</td><td class="why" colspan="{span}">{_text(row.reason)}</td>'
        else:
            bad = ' class="bad"' if row.differs else ""
            cells = "".join(
                f"<td{bad if index > len(COLUMNS) - 3 else ''}>{_text(cell)}</td>"
                for index, cell in enumerate(row_cells(row))
                if index in kept
            )
        body.append(f"<tr>{cells}</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{chr(10).join(body)}\n</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
