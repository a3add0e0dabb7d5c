"""The HTML form of a report: one self-contained page without scripts or anything fetched."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from memopt.budget import format_bytes
from memopt.pass_manager import PassRecord
from memopt.report.curve_svg import curve_svg
from memopt.report.curve_table import format_seconds
from memopt.report.record import ProgramReport, Report, TensorRow
from memopt.report.svg import timeline_svg
from memopt.report.text import describe_evidence, headline, summed, title

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #667085; --line: #dfe3ea; --page: #ffffff; --card: #f6f7f9;
  --after: #2563eb; --before: #98a2b3; --budget: #c2410c; --bad: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #323a48; --page: #14181f;
  --card: #1d232d; --after: #6ea8fe; --before: #667085; --budget: #fb923c; --bad: #f87171; } }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p.sub, .legend { color: var(--soft); margin: .2rem 0 1rem; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .8rem; margin: 1rem 0; }
dl div { background: var(--card); border-radius: 8px; padding: .7rem .9rem; }
dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; font-weight: 600; } dd.bad { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; } td.number, th.number { text-align: right; white-space: nowrap; }
code { font: .85em ui-monospace, monospace; overflow-wrap: anywhere; } summary { cursor: pointer; }
svg { width: 100%; height: auto; } svg .grid { stroke: var(--line); } svg .tick { fill: var(--soft); font-size: 11px; }
svg .after { fill: none; stroke: var(--after); stroke-width: 1.6; } svg .area { fill: var(--after); opacity: .14; }
svg .before { fill: none; stroke: var(--before); stroke-width: 1.4; }
svg .budget { stroke: var(--budget); stroke-width: 1.6; stroke-dasharray: 6 4; }
svg .boundary { stroke: var(--soft); stroke-dasharray: 2 3; }
.legend b { font-weight: 600; } .k-after { color: var(--after); } .k-before { color: var(--before); }
.k-budget { color: var(--budget); } svg .point, svg .chosen { fill: var(--after); }
svg .chosen { stroke: var(--page); stroke-width: 2; }
"""


def to_html(report: Report) -> str:
    """One page: the figures, the timelines, the largest tensors, and every pass with its changes and refusals."""
    parts = [
        f"<h1>{_text(report.model or 'model')}</h1>",
        f'<p class="sub">{_text(title(report))}</p>',
        _cards(report),
        *[f"<p>{_text(note)}</p>" for note in report.notes],
        _curve(report),
        *[_program(program, report.budget_bytes) for program in report.programs],
        _breakdown(report),
        _passes(report.passes),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>memopt: {_text(report.model or 'report')}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{chr(10).join(part for part in parts if part)}\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _cards(report: Report) -> str:
    measured, budget = report.measured_peak_bytes, report.budget_bytes
    over = measured is not None and budget is not None and measured > budget
    cards = [
        f"<div><dt>{_text(name)}</dt><dd{_bad(over and name == 'measured peak')}>{_text(value)}</dd></div>"
        for name, value in headline(report)
    ]
    return f"<dl>{''.join(cards)}</dl>"


def _bad(condition: bool) -> str:
    return ' class="bad"' if condition else ""


def _curve(report: Report) -> str:
    if not report.curve:
        return ""
    legend = ['<b class="k-after">━ plans that were found</b>']
    if any(point.chosen for point in report.curve):
        legend.append('<b class="k-after">● the chosen one</b>')
    if report.budget_bytes is not None:
        legend.append('<b class="k-budget">┅ budget</b>')
    cells = [
        ("→" if point.chosen else "", format_bytes(point.bytes), format_seconds(point.seconds), f"{point.extra:+.1%}")
        for point in report.curve
    ]
    table = _table(("", "peak of the step", "time", "added"), cells, numbers=(1, 2, 3))
    return "\n".join(
        [
            "<h2>What more or less memory would cost</h2>",
            f'<p class="legend">predicted time added at each peak of the step: {" · ".join(legend)}</p>',
            curve_svg(report.curve, report.budget_bytes),
            f"<details><summary>{len(report.curve)} plans</summary>{table}</details>",
        ]
    )


def _program(program: ProgramReport, budget: int | None) -> str:
    parts = [f"<h2>{_text(program.name)}: {program.kind}, {program.nodes} nodes</h2>"]
    if program.timeline_after or program.timeline_before:
        legend = ['<b class="k-after">━ with memopt</b>']
        if program.timeline_before:
            legend.append('<b class="k-before">━ without a plan</b>')
        if budget is not None:
            legend.append('<b class="k-budget">┅ budget</b>')
        parts.append(f'<p class="legend">bytes on the device at each step: {" · ".join(legend)}</p>')
        parts.append(
            timeline_svg(
                program.timeline_before, program.timeline_after, budget, program.forward_steps, name=program.name
            )
        )
    parts += [_tensors("kept for backward", program.saved), _tensors("computed again in backward", program.recomputed)]
    return "\n".join(part for part in parts if part)


def _tensors(heading: str, rows: Sequence[TensorRow]) -> str:
    if not rows:
        return ""
    ordered = sorted(rows, key=lambda row: -row.bytes)
    cells = [
        (row.name, format_bytes(row.bytes), "" if row.seconds is None else f"{row.seconds * 1e3:.3f} ms", row.source)
        for row in ordered
    ]
    table = _table(("tensor", "size", "time to compute", "source"), cells, numbers=(1, 2), code=(0, 3))
    return f"<details><summary>{_text(heading)}: {_text(summed(rows))}</summary>{table}</details>"


def _breakdown(report: Report) -> str:
    breakdown = report.breakdown
    headings = [(name, format_bytes(value)) for name, value in breakdown.headings()]
    parts = ["<h2>Where the bytes of the predicted peak go</h2>", _table(("", "size"), headings, numbers=(1,))]
    if breakdown.largest:
        largest = [
            (tensor.name, format_bytes(tensor.bytes), f"{tensor.dtype}{list(tensor.shape)}", tensor.source)
            for tensor in breakdown.largest
        ]
        parts.append("<h2>Largest tensors at the peak</h2>")
        parts.append(_table(("tensor", "size", "type", "source"), largest, numbers=(1,), code=(0, 2, 3)))
    return "\n".join(parts)


def _passes(records: Sequence[PassRecord]) -> str:
    if not records:
        return ""
    cells = [
        (
            record.name,
            f"{record.nodes_before} → {record.nodes_after}",
            str(len(record.changes)),
            str(len(record.refusals)),
            f"{record.seconds:.2f}",
            describe_evidence(record.evidence),
        )
        for record in records
    ]
    head = ("pass", "nodes", "changes", "refusals", "seconds", "evidence")
    parts = ["<h2>Passes</h2>", _table(head, cells, numbers=(1, 2, 3, 4), code=(0,))]
    for record in records:
        changes = [(c.summary, ", ".join(c.before), ", ".join(c.after)) for c in record.changes]
        refusals = [(r.node, r.reason) for r in record.refusals]
        if changes:
            table = _table(("what was done", "nodes before", "nodes after"), changes, code=(1, 2))
            parts.append(f"<details><summary>{_text(record.name)}: {len(changes)} changes</summary>{table}</details>")
        if refusals:
            table = _table(("node", "why not"), refusals, code=(0,))
            parts.append(f"<details><summary>{_text(record.name)}: {len(refusals)} refusals</summary>{table}</details>")
        unproved = record.evidence.unproved if record.evidence else ()
        if unproved:
            table = _table(("region, and why it was not run",), [(line,) for line in unproved])
            parts.append(
                f"<details><summary>{_text(record.name)}: {len(unproved)} not proved</summary>{table}</details>"
            )
    return "\n".join(parts)


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), code: Sequence[int] = ()
) -> str:
    def cell(tag: str, column: int, value: str) -> str:
        kind = ' class="number"' if column in numbers else ""
        inner = f"<code>{_text(value)}</code>" if tag == "td" and column in code and value else _text(value)
        return f"<{tag}{kind}>{inner}</{tag}>"

    def line(tag: str, values: Sequence[str]) -> str:
        return f"<tr>{''.join(cell(tag, column, value) for column, value in enumerate(values))}</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{line("th", head)}</thead><tbody>\n{body}\n</tbody></table></div>'
