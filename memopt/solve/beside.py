"""The trade-off of a graph that is one of several in a step: what it saves is held while the others run, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from memopt.solve.phase_peaks import PhasePeaks, all_phase_peaks
from memopt.solve.problem import StepProblem
from memopt.solve.recompute import Curve, Plan, curve, evenly
from memopt.solve.schedule import Schedule, simulate

# How many of the plans that save less are taken over.
_MOST = 48

T = TypeVar("T")


def curve_beside(problem: StepProblem, kernels: Sequence[bool] = (), *, seconds: float = 20.0) -> Curve:
    """The trade-off between seconds and what each phase takes, and what is saved between them.

    A plan with the least peak of its own may save more than one that recomputes everything at once. That one is
    found where a moment between forward and backward is the dearest: by a workspace there as large as the step.

    Args:
        problem: the graph's step in plain numbers.
        kernels: as for `phase_peaks`.
        seconds: for the search, of one core.

    Returns:
        Plans with rising seconds, none worse than another in all of its bytes and in time; with their peaks.
    """
    found = list(curve(problem, seconds=seconds / 2).points)
    if 0 < problem.forward < len(problem.reads):
        saving = curve(_saved_alone(problem), seconds=seconds / 2).points
        found += [_counted(problem, point) for point in evenly(saving, _MOST)]
    peaks = all_phase_peaks(problem, (point.schedule for point in found), kernels)
    rated = [*zip(found, peaks, strict=True)]
    rated.sort(key=lambda item: (item[0].seconds, item[1].backward, item[1].saved, item[1].forward))
    kept: list[tuple[Plan, PhasePeaks]] = []
    for point, phases in rated:
        if not any(_takes_no_more(other, phases) for _, other in kept):
            kept.append((point, phases))
    least = min(point.peak_bytes for point, _ in kept)
    points = tuple(dataclasses.replace(point, minimum_bytes=least) for point, _ in kept)
    return Curve(points, tuple(phases for _, phases in kept))


def _takes_no_more(one: PhasePeaks, other: PhasePeaks) -> bool:
    return one.forward <= other.forward and one.backward <= other.backward and one.saved <= other.saved


def _saved_alone(problem: StepProblem) -> StepProblem:
    """The same step whose dearest moment is one between its two graphs, whatever is computed in them."""
    at = problem.forward

    def with_moment(values: tuple[T, ...], own: T) -> tuple[T, ...]:
        return (*values[:at], own, *values[at:])

    return dataclasses.replace(
        problem,
        reads=with_moment(problem.reads, ()),
        writes=with_moment(problem.writes, ()),
        costs=with_moment(problem.costs, 0.0),
        workspace=with_moment(problem.workspace, sum(problem.sizes)),
        recomputable=with_moment(problem.recomputable, False),
        forward=at + 1,
    )


def _counted(problem: StepProblem, point: Plan) -> Plan:
    """A plan of that step as one of the step as it is, with what it takes there."""
    at = problem.forward
    steps = tuple(step - (step > at) for step in point.schedule.steps if step != at)
    schedule = Schedule(steps, at)
    return dataclasses.replace(point, schedule=schedule, peak_bytes=simulate(problem, schedule).peak_bytes)
