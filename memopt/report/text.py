"""The text form of a report."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from memopt.budget import format_bytes
from memopt.evidence import Evidence
from memopt.memory.breakdown import align
from memopt.report.curve_table import curve_table
from memopt.report.record import ExecutableReport, ProgramReport, Report, TensorRow

_BARS = "▁▂▃▄▅▆▇█"
_REFUSALS_SHOWN = 3
_ROWS_SHOWN = 5
_SHORT = 0.05  # seconds


def to_text(report: Report) -> str:
    """The whole report as lines that fit a terminal; lists are cut, and say by how much."""
    lines = [title(report), *_indent(align(headline(report), right=())), ""]
    lines += [f"note: {note}" for note in report.notes]
    if report.notes:
        lines.append("")
    lines += ["where the bytes of the predicted peak go:", *_indent(str(report.breakdown).splitlines()), ""]
    if len(report.curve) > 1:
        lines += _curve(report)
    for program in report.programs:
        lines += [*_program(program), ""]
    if report.executables:
        lines += ["what the engine's executables take:", *_indent(_executables(report.executables)), ""]
    if report.seconds:
        lines += ["seconds of planning and compiling:", *_indent(_seconds(report.seconds)), ""]
    if report.passes:
        lines += ["passes:", *_indent(_passes(report))]
    return "\n".join(lines).rstrip()


def curve_text(report: Report) -> str:
    """The curve alone: what a step takes at which budget. The whole report where it has no curve."""
    return "\n".join([title(report), "", *_curve(report)]).rstrip() if report.curve else to_text(report)


def title(report: Report) -> str:
    """One line: the model, the engine, and what the figures were taken on."""
    environment = report.environment
    model, backend = report.model or "model", f", backend {report.backend}" if report.backend else ""
    return f"{model}{backend}: {environment.device}, torch {environment.torch}, {environment.threads} threads"


def headline(report: Report) -> list[tuple[str, str]]:
    """The figures that decide, as (what, value in words); what is not known is left out or says so."""
    rows = [("without a plan", format_bytes(report.unconstrained_bytes))]
    if report.budget_bytes is not None:
        rows.append(("budget", format_bytes(report.budget_bytes)))
    rows.append(("predicted peak", format_bytes(report.peak_bytes)))
    rows.append(("measured peak", measured(report)))
    if report.minimum_bytes is not None:
        bound = "at most " if report.minimum_is_a_bound else ""
        rows.append(("least possible", f"{bound}{format_bytes(report.minimum_bytes)}"))
    return rows


def measured(report: Report) -> str:
    """The measured peak, and whether it keeps the budget."""
    if report.measured_peak_bytes is None:
        return "not measured"
    text = format_bytes(report.measured_peak_bytes)
    if report.budget_bytes is None:
        return text
    over = report.measured_peak_bytes - report.budget_bytes
    return f"{text}: {'within the budget' if over <= 0 else 'OVER THE BUDGET'}"


def describe_evidence(evidence: Evidence | None) -> str:
    """The proof of one pass in one phrase."""
    if evidence is None:
        return ""
    if evidence.regions == 0:
        return "equal by structure"
    if evidence.max_abs_error == 0:
        error = "bitwise equal"
    else:
        error = f"max abs error {evidence.max_abs_error:.1e}, {evidence.error_ratio:.2g}x the error before"
    unproved = f", {len(evidence.unproved)} not proved" if evidence.unproved else ""
    return f"{error} ({evidence.scope}: {evidence.proved} run of {evidence.regions}{unproved})"


def sparkline(values: Sequence[int], width: int = 72, top: int | None = None) -> str:
    """One bar per step, from zero to `top`; more steps than `width` are drawn as the largest of each group.

    Args:
        values: bytes at each step.
        width: the most characters.
        top: bytes that a full bar stands for; the largest value by default.
    """
    groups = largest_of_groups(values, width)
    top = top or max(groups, default=0) or 1
    return "".join(_BARS[round(value / top * (len(_BARS) - 1))] for value in groups)


def largest_of_groups(values: Sequence[int], count: int) -> list[int]:
    """At most `count` values: the largest of each of `count` groups of neighbours, so that no peak is lost."""
    if len(values) <= count:
        return list(values)
    edges = [index * len(values) // count for index in range(count + 1)]
    return [max(values[start:end]) for start, end in itertools.pairwise(edges)]


def summed(rows: Iterable[TensorRow]) -> str:
    """How many tensors, and their bytes together."""
    rows = list(rows)
    return f"{len(rows)} {'tensor' if len(rows) == 1 else 'tensors'}, {format_bytes(sum(row.bytes for row in rows))}"


def _curve(report: Report) -> list[str]:
    lines = ["what more or less memory would cost (predicted):", *_indent(curve_table(report.curve))]
    if any(point.chosen for point in report.curve):
        chosen = "without a budget" if report.budget_bytes is None else "for this budget"
        lines.append(f"  → what is chosen {chosen}")
    return [*lines, ""]


def _program(program: ProgramReport) -> list[str]:
    lines = [f"{program.name} ({program.kind}): {program.nodes} nodes"]
    if program.kind == "training":
        lines.append(f"  kept for backward: {summed(program.saved)}; recomputed: {summed(program.recomputed)}")
    # Both lines on one scale: the plan's gain is to be seen.
    top = max((*program.timeline_before, *program.timeline_after), default=0)
    for label, values in (("before", program.timeline_before), ("after", program.timeline_after)):
        if values:
            lines.append(f"  {label:6}  {sparkline(values, top=top)}  {format_bytes(max(values))}")
    for label, rows in (("largest kept", program.saved), ("largest recomputed", program.recomputed)):
        if rows:
            shown = sorted(rows, key=lambda row: -row.bytes)[:_ROWS_SHOWN]
            table = [(row.name, format_bytes(row.bytes), row.source) for row in shown]
            lines += [f"  {label}:", *_indent(_indent(align(table, right=(1,))))]
    return lines


def _seconds(seconds: Mapping[str, float]) -> list[str]:
    """The longest phases first, those too short to be seen left out."""
    rows = sorted(seconds.items(), key=lambda item: -item[1])
    shown = [(name, f"{taken:.1f}") for name, taken in rows if taken >= _SHORT] or [
        ("all together", f"{sum(seconds.values()):.2f}")
    ]
    return align(shown, right=(1,))


def _executables(executables: Sequence[ExecutableReport]) -> list[str]:
    shown = sorted(executables, key=lambda one: -one.peak)[:_ROWS_SHOWN]
    rows = [("", "arguments", "outputs", "temporaries", "together")]
    for one in shown:
        sizes = [format_bytes(size) for size in (one.arguments, one.outputs, one.temporaries, one.peak)]
        rows.append((one.name, sizes[0], sizes[1], sizes[2], sizes[3]))
    hidden = len(executables) - len(shown)
    return align(rows, right=(1, 2, 3, 4)) + ([f"{hidden} smaller ones: see the JSON report"] if hidden else [])


def _passes(report: Report) -> list[str]:
    rows = [("pass", "nodes", "changes", "refusals", "seconds", "evidence")]
    for record in report.passes:
        nodes = f"{record.nodes_before} → {record.nodes_after}"
        counts = (str(len(record.changes)), str(len(record.refusals)), f"{record.seconds:.2f}")
        rows.append((record.name, nodes, *counts, describe_evidence(record.evidence)))
    lines = align(rows, right=(1, 2, 3, 4))
    for record in report.passes:
        for refusal in record.refusals[:_REFUSALS_SHOWN]:
            lines.append(f"{record.name} refused {refusal.node}: {refusal.reason}")
        hidden = len(record.refusals) - _REFUSALS_SHOWN
        if hidden > 0:
            lines.append(f"{record.name} refused {hidden} more: see the JSON or HTML report")
    return lines


def _indent(lines: Iterable[str]) -> list[str]:
    return [f"  {line}".rstrip() for line in lines]
