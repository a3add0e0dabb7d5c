"""One report with something in every field."""

from __future__ import annotations

import math

from memopt.evidence import Evidence
from memopt.memory.breakdown import MemoryBreakdown, TensorAtPeak
from memopt.pass_manager import Change, PassRecord, Refusal
from memopt.report import CurvePoint, Environment, ProgramReport, Report, TensorRow

NASTY = "<script>alert(\"1\")</script> & 'ü'"


def report() -> Report:
    proof = Evidence("regions", 3, 2, 1.5e-7, 2.0, math.inf, (f"relu: {NASTY}",))
    refusals = tuple(Refusal(f"conv_{index}", NASTY) for index in range(5))
    return Report(
        passes=(
            PassRecord("merge_common", 0.25, 120, 117, (Change("merged", ("a", "b"), ("a",)),), refusals, proof),
            PassRecord("inplace", 0.5, 117, 117, (), (), None),
        ),
        peak_bytes=880_000_000,
        measured_peak_bytes=879_000_000,
        minimum_bytes=600_000_000,
        budget_bytes=900_000_000,
        unconstrained_bytes=1_500_000_000,
        breakdown=MemoryBreakdown(
            300_000_000, 0, 300_000_000, 0, 1000, 279_000_000, 0, 879_001_000,
            (TensorAtPeak(NASTY, 50_000_000, (5, 10), "float32", f"model.py:3, {NASTY}"),),
        ),
        programs=(
            ProgramReport(
                "graph_0", "training", 117, (10**8, 15 * 10**8, 2 * 10**8), (10**8, 88 * 10**7, 2 * 10**8, 10**8),
                (TensorRow(NASTY, 4_000_000, "model.py:3, relu(x)"),), (TensorRow("gelu", 10**6, "", 0.5),), 2,
            ),
            ProgramReport("graph_1", "inference", 3),
        ),
        notes=(f"no C++ compiler: aten is used {NASTY}",),
        environment=Environment("2.13.0", "cpu", 4),
        seconds={"searching": 1.5, NASTY: 0.25},
        model=NASTY,
        backend="aten",
        curve=(
            CurvePoint(15 * 10**8, 0.5, 0.0), CurvePoint(880_000_000, 0.55, 0.1, chosen=True),
            CurvePoint(600_000_000, 0.7, 0.4),
        ),
    )  # fmt: skip
