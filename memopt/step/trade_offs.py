"""The trade-off of each graph of a step between memory and time: what is searched, and in how long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from memopt.program import Program
from memopt.solve.phase_peaks import PhasePeaks
from memopt.solve.recompute import Curve
from memopt.solve.solver_worker import Job, searched, with_peaks
from memopt.step.encode_step import Cost, Lowering, lower


def lowerings_of(programs: Sequence[Program], costs: Sequence[Mapping[str, Cost]]) -> list[Lowering]:
    """The programs of a step as numbers; costs are seconds and workspace by node name."""
    return [lower(program, cost) for program, cost in zip(programs, costs, strict=True)]


def jobs_of(lowerings: Sequence[Lowering], seconds: float) -> list[Job]:
    """The searches of a step's graphs, in so many seconds all together, each with its share of them."""
    weight = [len(lowering.operations) for lowering in lowerings]
    return [
        Job(lowering.problem, seconds * share / max(1, sum(weight)), lowering.kernels, beside=len(lowerings) > 1)
        for lowering, share in zip(lowerings, weight, strict=True)
    ]


def curves_of(
    lowerings: Sequence[Lowering], seconds: float, search: Callable[[Lowering, float], Curve] | None = None
) -> list[Curve]:
    """The trade-off of each graph of a step, in so many seconds all together; `search` as for `StepPlanner`."""
    jobs = jobs_of(lowerings, seconds)
    if search is None:
        return searched(jobs)
    return [search(lowering, job.seconds) for lowering, job in zip(lowerings, jobs, strict=True)]


def peaks_on(found: Curve, lowering: Lowering) -> tuple[PhasePeaks, ...]:
    """What both graphs of each plan on a curve take."""
    return found.peaks or with_peaks(found, lowering.problem, lowering.kernels).peaks
