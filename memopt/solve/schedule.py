"""Schedule and simulate: an order of execution with recomputations, and the bytes and seconds that it takes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from memopt.solve.liveness import profile
from memopt.solve.problem import StepProblem


class ScheduleError(ValueError):
    """A schedule cannot run, or is not what it claims to be; the message names the step and the operation."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """An order of execution.

    Running an operation creates fresh copies of all that it writes. A read binds to the latest copy. A copy is freed
    right after the last step that reads it, or after its own step when nobody does. The first copy of a pinned storage
    is never freed.

    Attributes:
        steps: operations in order of execution: first each forward operation once, in order, then the backward pass
            with recomputed operations anywhere in it.
        forward: number of leading steps that are the forward pass (the problem's `forward`).
    """

    steps: tuple[int, ...]
    forward: int


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a schedule takes.

    Attributes:
        peak_bytes: the most bytes at any step; 0 without steps.
        peak_step: the first step at which the peak is reached; -1 without steps.
        live_bytes: bytes at each step: live copies, among them what the step reads and writes, and its workspace.
        seconds: sum of the costs of all steps.
        saved: storages made in forward whose forward copy a backward step reads, ascending.
    """

    peak_bytes: int
    peak_step: int
    live_bytes: tuple[int, ...]
    seconds: float
    saved: tuple[int, ...]


def simulate(problem: StepProblem, schedule: Schedule) -> Trace:
    """Return the bytes at each step and the seconds of a schedule.

    Raises:
        ScheduleError: a step reads a storage that no earlier step made.
    """
    steps, count = schedule.steps, len(schedule.steps)
    current: dict[int, int] = {}  # storage → index of its latest copy
    storage_of: list[int] = []
    born: list[int] = []
    last: list[int] = []

    def create(storage: int, step: int, until: int) -> None:
        current[storage] = len(born)
        storage_of.append(storage)
        born.append(step)
        last.append(until)

    for step, operation in enumerate(steps):
        if step == schedule.forward:
            for storage in sorted(problem.arriving):
                create(storage, step, count - 1)
        for storage in problem.reads[operation]:
            if storage in current:
                last[current[storage]] = max(step, last[current[storage]])
            elif storage not in problem.resident:
                raise ScheduleError(f"step {step} (operation {operation}) reads storage {storage} before it is written")
        for storage in problem.writes[operation]:
            kept = storage in problem.pinned and storage not in current
            create(storage, step, count - 1 if kept else step)
    if not steps:
        return Trace(0, -1, (), 0.0, ())
    sizes = [problem.sizes[storage] for storage in storage_of]
    live = profile(count, np.array((born, np.array(last, dtype=np.int64) + 1, sizes), dtype=np.int64).T)
    live += np.array([problem.workspace[operation] for operation in steps], dtype=np.int64)
    return Trace(
        int(live.max()),
        int(live.argmax()),
        tuple(live.tolist()),
        math.fsum(problem.costs[operation] for operation in steps),
        _saved(problem, schedule),
    )


def _saved(problem: StepProblem, schedule: Schedule) -> tuple[int, ...]:
    made = {storage for operation in range(schedule.forward) for storage in problem.writes[operation]}
    saved: set[int] = set()
    for operation in schedule.steps[schedule.forward :]:
        saved.update(made.intersection(problem.reads[operation]))
        made.difference_update(problem.writes[operation])
    return tuple(sorted(saved))
