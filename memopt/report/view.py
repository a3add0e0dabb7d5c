"""What the page shows, as plain data: words and numbers that the script only has to draw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from memopt.budget import format_bytes
from memopt.graph.record import GraphRecord
from memopt.pass_manager import PassRecord
from memopt.report.curve_table import format_seconds
from memopt.report.record import ArenaReport, ExecutableReport, ProgramReport, Report, TensorRow
from memopt.report.side_by_side import any_block, grouped, side_by_side
from memopt.report.tables import TableWriter
from memopt.report.text import describe_evidence, measured, title

View = dict[str, Any]
_KINDS = ("same", "moved", "changed", "replaced", "removed", "added")


def report_view(report: Report) -> View:
    """The page of a compilation."""
    tables = TableWriter()
    view: View = {
        "title": report.model or "model",
        "subtitle": title(report),
        "cards": _cards(report),
        "notes": list(report.notes),
        "budget": report.budget_bytes,
        "breakdown": [list(row) for row in report.breakdown.headings()],
        "breakdown_title": "Where the bytes of the predicted peak go",
        "curve": [[point.bytes, point.seconds, point.extra, point.chosen] for point in report.curve],
        "programs": [_program(program, tables) for program in report.programs],
        "tables": _tables(report),
        "about": "",
        "passes": [pass_view(record, describe_evidence(record.evidence), tables) for record in report.passes],
    }
    return {**view, **tables.tables()}


def pass_view(record: Any, evidence: str, tables: TableWriter, unproved: Sequence[str] = ()) -> View:
    """One pass: a `PassRecord`, or a record with its fields."""
    before, after = record.before, record.after
    changed = before is not None and after is not None and before is not after
    if isinstance(record, PassRecord) and record.evidence is not None:
        unproved = record.evidence.unproved
    return {
        "name": record.name,
        "seconds": format_seconds(record.seconds),
        "nodes": [record.nodes_before, record.nodes_after],
        "changes": [[item.summary, list(item.before), list(item.after)] for item in record.changes],
        "refusals": [[item.node, item.reason] for item in record.refusals],
        "evidence": evidence,
        "unproved": list(unproved),
        "program": getattr(record, "program", 0),
        "figures": [] if before is None or after is None else _figures(before, after),
        "diff": diff_view(before, after, tables) if changed else [],
    }


def diff_view(before: GraphRecord, after: GraphRecord, tables: TableWriter) -> list[View]:
    """Two graphs side by side: groups of rows [kind, place before, place after, what differs]."""
    return [
        {
            "name": group.name,
            "phase": group.phase,
            "blocks": list(group.blocks),
            "rows": [
                [
                    _KINDS.index(pair.kind),
                    -1 if pair.before is None else tables.node(pair.before),
                    -1 if pair.after is None else tables.node(pair.after),
                    pair.why,
                ]
                for pair in group.pairs
            ],
        }
        for group in grouped(side_by_side(before, after))
    ]


def _figures(before: GraphRecord, after: GraphRecord) -> list[list[str]]:
    """Name, before and after, in words, of what a pass may change."""
    rows = []
    peaks = before.peak_bytes, after.peak_bytes
    if peaks[0] is not None and peaks[1] is not None:
        rows.append(
            ["peak above what is resident", *(format_bytes(size, short=True) for size in peaks if size is not None)]
        )
    rows.append(["arithmetic", _operations(before.flops), _operations(after.flops)])
    rows.append(["bytes moved", format_bytes(before.moved, short=True), format_bytes(after.moved, short=True)])
    return rows


def _operations(count: int) -> str:
    for unit, size in (("P", 10**15), ("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.4g} {unit}FLOP"
    return f"{count} FLOP"


def card(label: str, value: str, note: str = "", tone: str = "") -> View:
    """One figure of the summary; `tone` is "good", "bad" or empty."""
    return {"label": label, "value": value, "note": note, "tone": tone}


def table(
    name: str,
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    numbers: Sequence[int] = (),
    sources: Sequence[int] = (),
) -> View:
    """One plain table; the columns in `numbers` are aligned to the right, those in `sources` are lines of code."""
    return {
        "title": name,
        "head": list(head),
        "rows": [[str(cell) for cell in row] for row in rows],
        "numbers": list(numbers),
        "sources": list(sources),
    }


def _cards(report: Report) -> list[View]:
    plain, peak, budget = report.unconstrained_bytes, report.peak_bytes, report.budget_bytes
    cards = [card("budget", "none" if budget is None else format_bytes(budget, short=True))]
    share = f"{peak / plain - 1:+.0%} against no plan" if plain else ""
    tone = "" if budget is None else "good" if peak <= budget else "bad"
    cards.append(card("predicted peak", format_bytes(peak, short=True), share, tone))
    if report.measured_peak_bytes is None:
        cards.append(card("measured peak", "not measured"))
    else:
        over = budget is not None and report.measured_peak_bytes > budget
        words = measured(report).partition(": ")[2]
        tone = "" if budget is None else "bad" if over else "good"
        cards.append(card("measured peak", format_bytes(report.measured_peak_bytes, short=True), words, tone))
    cards.append(card("peak without a plan", format_bytes(plain, short=True)))
    if report.minimum_bytes is not None and report.curve:
        words = "at most: a plan is predicted to take less" if report.minimum_is_a_bound else ""
        cards.append(card("least possible", format_bytes(report.minimum_bytes, short=True), words))
    chosen = [point for point in report.curve if point.chosen]
    if chosen:
        cards.append(card("time of a step", format_seconds(chosen[0].seconds), f"predicted; {chosen[0].extra:+.1%}"))
    cards.append(_error(report.passes))
    return cards


def _error(passes: Sequence[PassRecord]) -> View:
    proofs = [record.evidence for record in passes if record.evidence is not None]
    if not any(record.changes for record in passes):
        return card("error", "none", "nothing was rewritten")
    if not proofs:
        return card("error", "not measured", "verification was off")
    worst = max(proof.max_abs_error for proof in proofs)
    count = sum(proof.proved for proof in proofs)
    value = "none" if worst == 0 else f"{worst:.1e}"
    return card("error", value, f"{'bitwise equal' if worst == 0 else 'largest difference'}; {count} regions run")


def _program(program: ProgramReport, tables: TableWriter) -> View:
    seconds = [list(program.seconds_before), list(program.seconds_after)]
    return {
        "name": program.name,
        "kind": program.kind,
        "note": "",
        "sides": ["without a plan", "with memopt"],
        "nodes": program.nodes,
        "forward": program.forward_steps,
        "lines": [list(program.timeline_before), list(program.timeline_after)],
        "seconds": seconds,
        "graphs": [None if graph is None else tables.add(graph) for graph in (program.before, program.after)],
        "decisions": _decisions(program),
        "arena": None if program.arena is None else _arena(program.arena),
    }


def _decisions(program: ProgramReport) -> list[list[Any]]:
    """What was decided, the largest first: [what, names, bytes and seconds of all, module, source line].

    Tensors that one line makes in each of many blocks, of one size and decided alike, share a row.
    """
    nodes = {node.name: node for graph in (program.before, program.after) if graph is not None for node in graph.nodes}
    alike: dict[tuple[Any, ...], list[tuple[TensorRow, str]]] = defaultdict(list)
    for what, rows in (("kept", program.saved), ("recomputed", program.recomputed)):
        for row in rows:
            node = nodes.get(row.name)
            module, operator = (node.module, node.operator) if node is not None else ("", row.name)
            key = what, operator, row.bytes, row.source, row.seconds is None, any_block(module)
            alike[key].append((row, module))
    found = []
    for (what, _, size, source, unknown, pattern), members in alike.items():
        seconds = None if unknown else sum(row.seconds or 0.0 for row, _ in members)
        module = pattern if len({module for _, module in members}) > 1 else members[0][1]
        found.append([what, [row.name for row, _ in members], size * len(members), seconds, module, source])
    return sorted(found, key=lambda line: -line[2])


def _arena(arena: ArenaReport) -> View:
    homes = ("arena", "output", "operator")
    return {
        "bytes": arena.bytes,
        "bound": arena.lower_bound,
        "steps": len(arena.steps),
        "blocks": [
            [b.name, homes.index(b.home), b.bytes, b.start, b.end, b.offset, list(b.holds), b.scratch]
            for b in arena.blocks
        ],
    }


def _tables(report: Report) -> list[View]:
    found = []
    if report.executables:
        found.append(executables_table(report.executables))
    largest = [(t.name, format_bytes(t.bytes), f"{t.dtype}{list(t.shape)}", t.source) for t in report.breakdown.largest]
    # Where the graphs are recorded, the memory over time shows all of them, and opens at its peak.
    if largest and all(program.after is None for program in report.programs):
        found.append(table("Largest tensors at the peak", ("tensor", "size", "type", "source"), largest, (1,), (3,)))
    return found


def executables_table(executables: Sequence[ExecutableReport]) -> View:
    """What an engine says that each of its executables takes, the largest first."""
    rows = [
        (
            one.name,
            *(format_bytes(size, short=True) for size in (one.arguments, one.outputs, one.temporaries, one.peak)),
        )
        for one in sorted(executables, key=lambda one: -one.peak)
    ]
    head = ("executable", "arguments, weights included", "results", "temporaries", "together")
    return table("What the engine's executables take", head, rows, (1, 2, 3, 4))
