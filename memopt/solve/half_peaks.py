"""What the forward and backward graph of a step take by a schedule, where kernels write over what they read last."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memopt.solve.overwrite import overwritten
from memopt.solve.problem import StepProblem
from memopt.solve.schedule import Schedule, simulate


@dataclasses.dataclass(frozen=True)
class HalfPeaks:
    """Bytes of a step's storages.

    Attributes:
        forward: the most at any step of the forward graph.
        backward: the most at any step of the backward graph, what was saved included.
        saved: alive between the halves: what backward reads, and what the caller holds.
    """

    forward: int
    backward: int
    saved: int


def half_peaks(problem: StepProblem, schedule: Schedule, kernels: Sequence[bool] = ()) -> HalfPeaks:
    """Return what a schedule takes.

    Args:
        problem: the step in numbers.
        schedule: an order that can run.
        kernels: per operation, whether a kernel is generated for it, which writes over what it reads last. Empty:
            for none.
    """
    trace = simulate(problem, schedule)
    live = trace.live_bytes
    if any(kernels):
        spared = overwritten(problem, schedule, kernels)
        live = tuple(taken - less for taken, less in zip(live, spared, strict=True))
    outputs = {s for s in problem.pinned if problem.producer[s] < problem.forward}
    return HalfPeaks(
        forward=max(live[: problem.forward], default=0),
        backward=max(live[problem.forward :], default=0),
        saved=sum(problem.sizes[s] for s in outputs.union(trace.saved)),
    )
