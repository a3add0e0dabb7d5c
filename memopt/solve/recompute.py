"""What to recompute in backward so that a training step stays below a limit: `plan` for one limit, `curve` for all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeVar

from memopt.solve.archive import State
from memopt.solve.descend import refine, seed, slide
from memopt.solve.improve import Improver
from memopt.solve.phase_peaks import PhasePeaks
from memopt.solve.problem import StepProblem
from memopt.solve.rollout import Rollout
from memopt.solve.schedule import Schedule
from memopt.solve.search import Search

# Recomputing that adds no more than this share of the step's time counts as free.
FREE = 0.01
# Improving ends after so many operations played out (some ten seconds), or so many vain rounds per level.
EFFORT, PATIENCE = 15_000_000, 40
# The share of the time in which the floor is looked for apart, and how many of the lowest plans are taken over.
_SINKING, _DEEPEST = 0.2, 8

T = TypeVar("T")


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
        points: plans with rising seconds, and falling peak; none is worse than another in both. Of a graph beside
            others (`curve_beside`), none is worse in seconds and all bytes: peaks may rise, where less is saved.
        peaks: of each plan, what its two graphs take where kernels write over what they read last; empty where that was
            not asked for.
    """

    points: tuple[Plan, ...]
    peaks: tuple[PhasePeaks, ...] = ()

    @property
    def minimum_bytes(self) -> int:
        """The least peak found."""
        return min(point.peak_bytes for point in self.points)

    def at(self, limit: int) -> Plan | None:
        """Return the cheapest plan whose peak is at most `limit` bytes, or None."""
        return next((point for point in self.points if point.peak_bytes <= limit), None)


def curve(problem: StepProblem, *, seconds: float = 20.0) -> Curve:
    """Return the whole trade-off, searched for at most about `seconds` seconds of one core's time."""
    search = Search(Rollout(problem), seconds)
    seed(search)
    sink(search, seconds * _SINKING)
    slide(search, math.inf)
    _improve(search, refine(search, 0, math.inf))
    return _curve(problem, search)


def plan(problem: StepProblem, limit: int | None, *, seconds: float = 20.0) -> Plan:
    """Return the cheapest plan found whose peak is at most `limit` bytes.

    Without a limit: the plan with the least peak among those that add at most 1 % to the step's seconds. Where no plan
    keeps the limit: the one with the least peak, with `feasible` False.
    """
    search = Search(Rollout(problem), seconds)
    seed(search)
    if limit is None:
        dearest = problem.base_seconds * (1 + FREE)
        slide(search, dearest)
        refine(search, 0, dearest)
        return [point for point in _curve(problem, search).points if point.seconds <= dearest][-1]
    if search.archive.states[-1].peak > limit:
        sink(search, seconds * _SINKING)
        slide(search, math.inf)
        refine(search, limit, math.inf)
        _improve(search, [limit])
    found = _curve(problem, search)
    return found.at(limit) or dataclasses.replace(found.points[-1], feasible=False)


def sink(search: Search, seconds: float) -> None:
    """Look for the floor with the bytes that an operation touches for its cost.

    The floor found so does not depend on measured times, which differ from run to run: what one run promises as the
    least budget, another can meet.
    """
    problem = search.problem
    touched = tuple(
        1.0 + sum(problem.sizes[storage] for storage in (*reads, *writes))
        for reads, writes in zip(problem.reads, problem.writes, strict=True)
    )
    for state in _deep_states(dataclasses.replace(problem, costs=touched), seconds)[:_DEEPEST]:
        search.play(state.saved, state.hold)


def sunk(problem: StepProblem, seconds: float) -> Schedule:
    """The order with the least peak that is found within so many seconds of one core."""
    return Schedule(tuple(_deep_states(problem, seconds)[0].outcome.steps), problem.forward)


def _deep_states(problem: StepProblem, seconds: float) -> Sequence[State]:
    """What a search for the floor alone finds, of the least peak first."""
    search = Search(Rollout(problem), seconds, EFFORT)
    seed(search)
    slide(search, math.inf)
    Improver(search).run([0], PATIENCE)
    return search.archive.states


def _improve(search: Search, levels: list[int]) -> None:
    search.allow(EFFORT)
    Improver(search).run(levels, PATIENCE * len(levels))


def _curve(problem: StepProblem, search: Search) -> Curve:
    points: list[Plan] = []
    fastest, least = math.inf, search.archive.states[0].peak
    for state in search.archive.states:
        seconds = math.fsum(problem.costs[operation] for operation in state.outcome.steps)
        if seconds < fastest:
            fastest = seconds
            schedule = Schedule(tuple(state.outcome.steps), problem.forward)
            points.append(Plan(schedule, state.peak, seconds, seconds - problem.base_seconds, least, True))
    return Curve(tuple(reversed(points)))


def evenly(items: Sequence[T], most: int) -> tuple[T, ...]:
    """At most so many of the items, two or more, in their order; the first and the last among them."""
    if len(items) <= most:
        return tuple(items)
    return tuple(items[round(index * (len(items) - 1) / (most - 1))] for index in range(most))
