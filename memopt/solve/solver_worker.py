"""What a solver's process does: problems in, curves out. Imports no torch, so that such a process is there at once."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from typing import NamedTuple

from memopt.solve.beside import curve_beside
from memopt.solve.phase_peaks import all_phase_peaks
from memopt.solve.problem import StepProblem
from memopt.solve.recompute import Curve, curve


class Job(NamedTuple):
    """A search.

    Attributes:
        problem: one graph's step.
        seconds: for it, of one core.
        kernels: per operation, whether a kernel is generated for it (`phase_peaks`).
        beside: whether the graph is one of several in a step, so that what it saves counts by itself (`curve_beside`).
    """

    problem: StepProblem
    seconds: float
    kernels: tuple[bool, ...] = ()
    beside: bool = False


def searched(jobs: list[Job]) -> list[Curve]:
    """The trade-off of each problem, one after the other, with what both graphs of its plans take.

    Equal ones, as those of a block that runs several times, are searched once, in the time of all.
    """
    alike: dict[Job, float] = {}
    for job in jobs:
        key = job._replace(seconds=0.0)
        alike[key] = alike.get(key, 0.0) + job.seconds
    found = {key: _searched(key._replace(seconds=seconds)) for key, seconds in alike.items()}
    return [found[job._replace(seconds=0.0)] for job in jobs]


def _searched(job: Job) -> Curve:
    if job.beside:
        return curve_beside(job.problem, job.kernels, seconds=job.seconds)
    return with_peaks(curve(job.problem, seconds=job.seconds), job.problem, job.kernels)


def with_peaks(found: Curve, problem: StepProblem, kernels: tuple[bool, ...]) -> Curve:
    """The same curve with what the graphs of its plans take: thousands of operations, for each of hundreds of plans."""
    schedules = (point.schedule for point in found.points)
    return dataclasses.replace(found, peaks=all_phase_peaks(problem, schedules, kernels))


def serve() -> None:
    """Search what standard input asks for, once, and put the curves on standard output."""
    pickle.dump(searched(pickle.load(sys.stdin.buffer)), sys.stdout.buffer)
