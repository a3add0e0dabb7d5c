"""One line of a report, for the log."""

from __future__ import annotations

from memopt.budget import format_bytes
from memopt.report.record import Report


def summary(report: Report, seconds: float, *, gradients: bool) -> str:
    """One line of what was planned for a call, with gradients or without, and how long it took."""
    trains = any(program.kind == "training" for program in report.programs)
    if trains and not gradients:  # the report stays that of the step
        within = "" if report.budget_bytes is None else ", within the budget of the training step"
        return f"compiled and run inference in {seconds:.1f} s{within}"
    kind = "a training step" if trains else "inference"
    peak = f"predicted peak {format_bytes(report.peak_bytes, short=True)}"
    if report.budget_bytes is not None:
        peak += f" of a budget of {format_bytes(report.budget_bytes, short=True)}"
    if report.measured_peak_bytes is not None:
        peak += f", measured {format_bytes(report.measured_peak_bytes, short=True)}"
    return f"planned, compiled and run {kind} in {seconds:.1f} s: {peak}"
