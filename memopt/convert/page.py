"""The record of a conversion as one self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from memopt.convert.record import Conversion, Signature
from memopt.pass_manager import Change, Refusal

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid #8884; vertical-align: top; }
td.number { text-align: right; white-space: nowrap; } summary { cursor: pointer; }
"""


def to_html(record: Conversion) -> str:
    """The signature, the nodes before and after, every pass with its changes and refusals, and the comparison."""
    title = f"{record.source} → {record.output or 'nothing written'}"
    kinds = sorted({*record.nodes_before, *record.nodes_after})
    nodes = [(kind, record.nodes_before.get(kind, 0), record.nodes_after.get(kind, 0)) for kind in kinds]
    totals = ("all nodes", sum(record.nodes_before.values()), sum(record.nodes_after.values()))
    outputs = [
        (_sizes(run.sizes), item.name, f"{item.max_abs:.2e}", f"{item.max_relative:.2e}", f"{item.max_ulp:.3g}")
        for run in record.runs
        for item in run.outputs
    ]
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p>operator set {record.opset}; {sum(record.seconds.values()):.1f} s</p>",
        *(f"<p>{_text(note)}</p>" for note in record.notes),
        "<h2>Inputs and outputs</h2>",
        _table(("", "type", "shape"), map(_signature, (*record.inputs, *record.outputs))),
        "<h2>Before and after</h2>",
        _table(("", "before", "after"), (*record.sizes_and_times(), totals, *nodes)),
        "<h2>Compared with the source</h2>",
        _table(("sizes", "output", "largest difference", "of the largest value", "ulp"), outputs),
        "<h2>Passes</h2>",
        *(_pass(item.name, item.changes, item.refusals) for item in record.passes),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>memopt: {_text(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _pass(name: str, changes: Sequence[Change], refusals: Sequence[Refusal]) -> str:
    made = "".join(f"<li>{_text(item.summary)}</li>" for item in changes)
    refused = _table(("node", "refused because"), [(item.node, item.reason) for item in refusals])
    count = f"{len(changes)} changes, {len(refusals)} refusals"
    return f"<details><summary>{_text(name)}: {count}</summary><ul>{made}</ul>{refused if refusals else ''}</details>"


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{_text(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: object) -> str:
    return f'<td class="number">{value:,}</td>' if isinstance(value, int) else f"<td>{_text(value)}</td>"


def _signature(entry: Signature) -> tuple[str, str, str]:
    return entry.name, entry.dtype, f"[{', '.join(map(str, entry.shape))}]"


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{label} {size}" for label, size in sizes.items()) or "fixed"


def _text(value: object) -> str:
    return html.escape(str(value))
