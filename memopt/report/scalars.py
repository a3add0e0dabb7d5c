"""A report's figures as scalars by name: for loggers of training loops, TensorBoard's SummaryWriter say."""

from __future__ import annotations

from memopt.report.record import Report


def scalars(report: Report) -> dict[str, float]:
    """Memory in bytes and the plan's figures, by name; what is not known of this compilation is left out.

    `writer.add_scalar(f"memopt/{name}", value, step)` writes one to TensorBoard.
    """
    programs = report.programs
    figures = {
        "budget_bytes": report.budget_bytes,
        "predicted_peak_bytes": report.peak_bytes,
        "measured_peak_bytes": report.measured_peak_bytes,
        "unconstrained_bytes": report.unconstrained_bytes,
        "saved_bytes": sum(row.bytes for program in programs for row in program.saved),
        "recomputed_bytes": sum(row.bytes for program in programs for row in program.recomputed),
        "planning_seconds": sum(report.seconds.values()),
    }
    return {name: float(value) for name, value in figures.items() if value is not None}
