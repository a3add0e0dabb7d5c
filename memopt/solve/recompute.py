"""What to recompute in backward so that a training step stays below a limit: `plan` for one limit, `curve` for all."""

from __future__ import annotations

import dataclasses
import math
import time

from memopt.solve.archive import Archive
from memopt.solve.problem import StepProblem
from memopt.solve.rollout import Rollout
from memopt.solve.schedule import Schedule
from memopt.solve.search import descend

# Recomputing that adds no more than this share of the step's time counts as free.
FREE = 0.01


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule and what it takes.

    Attributes:
        schedule: the order of execution.
        peak_bytes: the most bytes at any step, as `simulate` counts them.
        seconds: sum of all costs, recomputed operations included.
        extra_seconds: seconds above a step that recomputes nothing.
        minimum_bytes: the least peak found for this problem by the search that made the plan.
        feasible: whether the peak is within the limit asked for; if not, this is the plan with the least peak found.
    """

    schedule: Schedule
    peak_bytes: int
    seconds: float
    extra_seconds: float
    minimum_bytes: int
    feasible: bool


@dataclasses.dataclass(frozen=True)
class Curve:
    """The trade-off between bytes and seconds.

    Attributes:
        points: plans with falling peak and rising seconds; none is worse than another in both.
    """

    points: tuple[Plan, ...]

    @property
    def minimum_bytes(self) -> int:
        """The least peak found."""
        return self.points[-1].peak_bytes

    def at(self, limit: int) -> Plan | None:
        """Return the cheapest plan whose peak is at most `limit` bytes, or None."""
        return next((point for point in self.points if point.peak_bytes <= limit), None)


def curve(problem: StepProblem, *, seconds: float = 20.0) -> Curve:
    """Return the whole trade-off, searched for at most about `seconds` seconds."""
    deadline = time.monotonic() + seconds
    rollout, archive = Rollout(problem), Archive()
    descend(rollout, archive, deadline)
    return _curve(problem, archive)


def plan(problem: StepProblem, limit: int | None, *, seconds: float = 20.0) -> Plan:
    """Return the cheapest plan found whose peak is at most `limit` bytes.

    Without a limit: the plan with the least peak among those that add at most 1 % to the step's seconds. Where no plan
    keeps the limit: the one with the least peak, with `feasible` False.
    """
    found = curve(problem, seconds=seconds)
    if limit is None:
        allowed = problem.base_seconds * (1 + FREE)
        return [point for point in found.points if point.seconds <= allowed][-1]
    return found.at(limit) or dataclasses.replace(found.points[-1], feasible=False)


def _curve(problem: StepProblem, archive: Archive) -> Curve:
    entries = archive.entries
    points: list[Plan] = []
    fastest = math.inf
    for peak, _, steps in entries:
        seconds = math.fsum(problem.costs[operation] for operation in steps)
        if seconds < fastest:
            fastest = seconds
            schedule = Schedule(tuple(steps), problem.forward)
            points.append(Plan(schedule, peak, seconds, seconds - problem.base_seconds, entries[0][0], True))
    return Curve(tuple(reversed(points)))
