"""Bytes that a schedule does not take where an operation may write its result over what it reads last."""

from __future__ import annotations

from collections.abc import Sequence

from memopt.solve.lives import shared_bytes
from memopt.solve.problem import StepProblem
from memopt.solve.schedule import Schedule


def overwritten(problem: StepProblem, schedule: Schedule, may: Sequence[bool]) -> tuple[int, ...]:
    """Return for each step the bytes that the results share with what is read there for the last time.

    `simulate` counts both at the step. A result takes the place of one copy of its own size that dies there. What is
    held to the end, was there before, or waits in backward since forward, keeps its place, and so does what another
    such operation has read since the last one that is none: both may be parts of one kernel, which reads it until it
    ends.

    Args:
        problem: the step in numbers.
        schedule: an order that can run.
        may: per operation, whether it may write over what it reads.
    """
    steps = schedule.steps
    made: dict[int, int] = {}  # storage → the step that made its present copy
    latest: dict[int, int] = {}  # storage → the step that reads that last, so far
    last: list[set[int]] = [set() for _ in steps]  # storages whose copies are read last there, and may be written over
    begun = 0  # since when operations follow each other that may
    for step, operation in enumerate(steps):
        if not may[operation]:
            begun = step + 1
        for storage in problem.reads[operation]:
            before = latest.get(storage, -1)
            if before >= 0:
                last[before].discard(storage)
            latest[storage] = step
            waited = made.get(storage, -1) < schedule.forward <= step
            if before < begun and not waited:
                last[step].add(storage)
        for storage in problem.writes[operation]:
            latest.pop(storage, None)  # a fresh copy: the one before stays dead where it was
            made[storage] = step
    held = problem.pinned | problem.resident | problem.arriving
    sizes, found = problem.sizes, [0] * len(steps)
    for step, operation in enumerate(steps):
        made_here = problem.writes[operation] if may[operation] and last[step] else ()
        dying = last[step] - held if made_here else ()
        if dying and len(made_here) == 1:  # most operations: thousands, for each plan of a curve
            size = sizes[made_here[0]]
            found[step] = size if any(sizes[storage] == size for storage in dying) else 0
        elif dying:
            found[step] = shared_bytes((sizes[s] for s in made_here), (sizes[s] for s in dying))
    return tuple(found)
