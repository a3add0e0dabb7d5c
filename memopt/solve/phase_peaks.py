"""What the forward and backward graph of a step take by a schedule, where kernels write over what they read last."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from memopt.solve.lives import Life, Lives
from memopt.solve.problem import StepProblem
from memopt.solve.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class PhasePeaks:
    """Bytes of a step's storages.

    Attributes:
        forward: the most at any step of the forward graph.
        backward: the most at any step of the backward graph, what was saved included.
        saved: alive between forward and backward: what backward reads, and what the caller holds.
    """

    forward: int
    backward: int
    saved: int


def phase_peaks(problem: StepProblem, schedule: Schedule, kernels: Sequence[bool] = ()) -> PhasePeaks:
    """Return what a schedule takes.

    Args:
        problem: the step in numbers.
        schedule: an order that can run.
        kernels: per operation, whether a kernel is generated for it, which writes over what it reads last. Empty:
            for none.
    """
    return _peaks(problem, Lives(problem, kernels).of(schedule))


def all_phase_peaks(
    problem: StepProblem, schedules: Iterable[Schedule], kernels: Sequence[bool] = ()
) -> tuple[PhasePeaks, ...]:
    """The same of many schedules of one problem."""
    lives = Lives(problem, kernels)
    return tuple(_peaks(problem, lives.of(schedule)) for schedule in schedules)


def _peaks(problem: StepProblem, found: Life) -> PhasePeaks:
    live = found.live - found.spared
    outputs = {s for s in problem.pinned if problem.producer[s] < problem.forward}
    return PhasePeaks(
        forward=int(live[: problem.forward].max(initial=0)),
        backward=int(live[problem.forward :].max(initial=0)),
        saved=sum(problem.sizes[s] for s in outputs.union(found.saved.tolist())),
    )
