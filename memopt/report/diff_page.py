"""Two models side by side as one self-contained HTML page, without scripts or anything fetched."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from memopt.difference.graph_diff import Alignment

if TYPE_CHECKING:
    from memopt.difference.model_diff import ModelDiff

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #667085; --line: #dfe3ea; --page: #ffffff; --gone: #fdecd8;
  --new: #dbeafe; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #323a48; --page: #14181f;
  --gone: #4a2c11; --new: #16305c; } }
body { margin: 0 auto; max-width: 90rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; } td.number { text-align: right; white-space: nowrap; }
table.nodes { width: 100%; table-layout: fixed; } table.nodes td { padding: .2rem .4rem; }
table.nodes col.mark { width: 5.5rem; } code { font: .82em ui-monospace, monospace; overflow-wrap: anywhere; }
td.mark, tr.gap td { color: var(--soft); } td.gone { background: var(--gone); } td.new { background: var(--new); }
"""


def to_html(diff: ModelDiff, context: int = 3) -> str:
    """The figures, and the nodes of both side by side: what changed, with so many lines around it."""
    figures = "".join(
        f'<tr><td>{_text(row.name)}</td><td class="number">{_text(row.words(row.before))}</td>'
        f'<td class="number">{_text(row.words(row.after))}</td></tr>'
        for row in diff.figures
    )
    parts = [
        f"<h1>{_text(diff.before)} → {_text(diff.after)}</h1>",
        f"<table><thead><tr><th></th><th>before</th><th>after</th></tr></thead><tbody>{figures}</tbody></table>",
    ]
    for index, graph in enumerate(diff.graphs):
        counts = ", ".join(f"{count} {kind}" for kind, count in graph.counts().items() if count)
        parts.append(f"<h2>graph {index}: {_text(counts or 'the same nodes')}</h2>")
        operators = "".join(
            f'<tr><td><code>{_text(kind)}</code></td><td class="number">{old}</td><td class="number">{new}</td></tr>'
            for kind, old, new in graph.by_operator()
        )
        if operators:
            head = "<thead><tr><th>operator</th><th>before</th><th>after</th></tr></thead>"
            parts.append(f"<table>{head}<tbody>{operators}</tbody></table>")
        if not graph.equal:
            parts.append(_nodes(graph, context))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>memopt diff</title><style>{_STYLE}</style></head>\n<body>\n{chr(10).join(parts)}\n</body></html>\n"
    )


def _nodes(graph: Alignment, context: int) -> str:
    changed = [index for index, row in enumerate(graph.rows) if row.kind != "same"]
    shown = {near for index in changed for near in range(index - context, index + context + 1)}
    lines, gap = [], 0
    for index, row in enumerate(graph.rows):
        if index not in shown:
            gap += 1
            continue
        lines += [_gap(gap)] if gap else []
        gap = 0
        cells = []
        for side, place, kind in ((graph.before, row.before, "gone"), (graph.after, row.after, "new")):
            mark = f' class="{kind}"' if place is not None and row.kind not in ("same", "moved") else ""
            code = "" if place is None else f"<code>{_text(side[place].line())}</code>"
            cells.append(f"<td{mark}>{code}</td>")
        name = "" if row.kind == "same" else row.kind
        lines.append(f'<tr><td class="mark" title="{_text(row.why)}">{name}</td>{"".join(cells)}</tr>')
    lines += [_gap(gap)] if gap else []
    columns = '<colgroup><col class="mark"><col><col></colgroup>'
    return f'<table class="nodes">{columns}<tbody>\n{chr(10).join(lines)}\n</tbody></table>'


def _gap(count: int) -> str:
    return f'<tr class="gap"><td></td><td colspan="2">{count} the same</td></tr>'


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
