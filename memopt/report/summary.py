"""One line of a report, for the log."""

from __future__ import annotations

from memopt.budget import format_bytes
from memopt.report.record import Report


def summary(report: Report, seconds: float) -> str:
    """One line of what was planned, and how long it took."""
    kind = "a training step" if any(program.kind == "training" for program in report.programs) else "inference"
    peak = f"predicted peak {format_bytes(report.peak_bytes, short=True)}"
    if report.budget_bytes is not None:
        peak += f" of a budget of {format_bytes(report.budget_bytes, short=True)}"
    if report.measured_peak_bytes is not None:
        peak += f", measured {format_bytes(report.measured_peak_bytes, short=True)}"
    return f"planned, compiled and run {kind} in {seconds:.1f} s: {peak}"
