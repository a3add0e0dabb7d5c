"""The record of a conversion as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping

from memopt.budget import format_bytes
from memopt.convert.record import PASSES_ON, Conversion, Signature
from memopt.graph.record import GraphRecord
from memopt.onnx.evidence import OnnxEvidence
from memopt.report.curve_table import format_seconds
from memopt.report.html_page import render_page
from memopt.report.tables import TableWriter
from memopt.report.view import View, card, pass_view, table


def to_html(record: Conversion) -> str:
    """The signature, the nodes before and after, every pass with its changes and refusals, and the comparison."""
    return render_page(conversion_view(record), record.to_text(explain=True))


def conversion_view(record: Conversion) -> View:
    """What the page of a conversion shows."""
    tables = TableWriter()
    whom = "" if record.target == "standard" else f", for {record.target}"
    view: View = {
        "title": f"{record.source} → {record.output or 'nothing written'}",
        "subtitle": f"ONNX, operator set {record.opset}{whom}",
        "cards": _cards(record),
        "notes": list(record.notes),
        "budget": None,
        "breakdown": [],
        "curve": [],
        "programs": _programs(record, tables),
        "tables": _tables(record),
        "about": PASSES_ON,
        "passes": [
            pass_view(item, _proof(item.evidence), tables, () if item.evidence is None else item.evidence.notes)
            for item in record.passes
        ],
    }
    return {**view, **tables.tables()}


def _cards(record: Conversion) -> list[View]:
    before, after = sum(record.nodes_before.values()), sum(record.nodes_after.values())
    cards = [
        card("nodes", f"{before:,} → {after:,}", f"{after / before - 1:+.0%}" if before else ""),
        card("file", _short(record.bytes_after), f"was {_short(record.bytes_before)}"),
    ]
    outputs = [output for run in record.runs for output in run.outputs]
    if outputs:
        worst = max(output.max_relative for output in outputs)
        allowed = f"within {record.allowed:.2g}" if record.allowed else "rounding"
        note = f"of the largest value, in {len(record.runs)} runs: {allowed}"
        cards.append(card("difference", f"{worst:.1e}", note, "good"))
    else:
        cards.append(card("difference", "none", "the output is the source as it was"))
    graphs = _graphs(record)
    peaks = [graph.peak_bytes for graph in graphs]
    if graphs and peaks[1] is not None:
        note = "weights aside" if peaks[0] is None else f"was {_short(peaks[0])}, weights aside"
        cards.append(card("peak of the results", _short(peaks[1]), note))
    if graphs and graphs[0].moved:
        share = f"{graphs[1].moved / graphs[0].moved - 1:+.0%}"
        cards.append(card("bytes moved", _short(graphs[1].moved), f"{share}; was {_short(graphs[0].moved)}"))
    old, new = record.cost_before.seconds, record.cost_after.seconds
    if new is not None:
        note = "" if old is None else f"was {format_seconds(old)}; on this CPU"
        cards.append(card("latency", format_seconds(new), note))
    cards.append(card("time", format_seconds(sum(record.seconds.values())), "to convert and to verify"))
    return cards


def _graphs(record: Conversion) -> list[GraphRecord]:
    """The graph before all passes and after them; nothing where they were not recorded."""
    found = [graph for item in record.passes for graph in (item.before, item.after) if graph is not None]
    return [found[0], found[-1]] if found else []


def _programs(record: Conversion, tables: TableWriter) -> list[View]:
    graphs = _graphs(record)
    if not graphs or graphs[1].unknown:
        return []
    first = record.runs[0].sizes if record.runs else {}
    sizes = f", at {_sizes(first)}" if first else ""
    return [
        {
            "name": "the graph",
            "kind": "inference",
            "note": f"every result from its node to its last use, weights aside{sizes}",
            "sides": ["as it came", "as rewritten"],
            "nodes": sum(record.nodes_after.values()),
            "forward": 0,
            "lines": [[] if graph.unknown else list(graph.live_bytes) for graph in graphs],
            "seconds": [[], []],
            "graphs": [tables.add(graph) for graph in graphs],
            "decisions": [],
            "arena": None,
        }
    ]


def _tables(record: Conversion) -> list[View]:
    kinds = sorted({*record.nodes_before, *record.nodes_after})
    nodes = [(kind, record.nodes_before.get(kind, 0), record.nodes_after.get(kind, 0)) for kind in kinds]
    nodes.sort(key=lambda row: (-abs(row[1] - row[2]), -row[1], row[0]))
    outputs = [
        (_sizes(run.sizes), item.name, f"{item.max_abs:.2e}", f"{item.max_relative:.2e}", f"{item.max_ulp:.3g}")
        for run in record.runs
        for item in run.outputs
    ]
    signature = [
        (role, *_signature(entry))
        for role, entries in (("input", record.inputs), ("output", record.outputs))
        for entry in entries
    ]
    found = [
        table("Inputs and outputs", ("", "name", "type", "shape"), signature),
        table("What it takes", ("", "before", "after"), record.sizes_and_times(), (1, 2)),
        table("Nodes by operator", ("operator", "before", "after"), nodes, (1, 2)),
    ]
    if outputs:
        head = ("sizes", "output", "largest difference", "of the largest value", "ulp")
        found.insert(1, table("Compared with the source", head, outputs, (2, 3, 4)))
    return found


def _proof(evidence: OnnxEvidence | None) -> str:
    if evidence is None:
        return ""
    words = "bitwise equal" if evidence.max_abs_error == 0 else f"largest difference {evidence.max_abs_error:.1e}"
    ratio = "" if evidence.error_ratio is None else f", {evidence.error_ratio:.2g}x the error of the model given"
    return f"{words}{ratio} ({evidence.engine}: {'; '.join(evidence.samples)})"


def _signature(entry: Signature) -> tuple[str, str, str]:
    return entry.name, entry.dtype, f"[{', '.join(map(str, entry.shape))}]"


def _short(size: int) -> str:
    return format_bytes(size, short=True)


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{label} {size}" for label, size in sizes.items()) or "fixed"
