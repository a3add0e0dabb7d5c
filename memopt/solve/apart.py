"""Searches for another process: problems in, curves out. Imports no torch, so that such a process is there at once."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from typing import NamedTuple

from memopt.solve.half_peaks import half_peaks
from memopt.solve.problem import StepProblem
from memopt.solve.recompute import Curve, curve


class Job(NamedTuple):
    """A problem, the seconds for its search, and per operation whether a kernel is generated for it (`half_peaks`)."""

    problem: StepProblem
    seconds: float
    kernels: tuple[bool, ...] = ()


def searched(jobs: list[Job]) -> list[Curve]:
    """The trade-off of each problem, one after the other, with what the halves of its plans take."""
    return [with_peaks(curve(job.problem, seconds=job.seconds), job.problem, job.kernels) for job in jobs]


def with_peaks(found: Curve, problem: StepProblem, kernels: tuple[bool, ...]) -> Curve:
    """The same curve with what the halves of its plans take: thousands of operations, for each of hundreds of plans."""
    peaks = tuple(half_peaks(problem, point.schedule, kernels) for point in found.points)
    return dataclasses.replace(found, peaks=peaks)


def serve() -> None:
    """Search what standard input asks for, once, and put the curves on standard output."""
    pickle.dump(searched(pickle.load(sys.stdin.buffer)), sys.stdout.buffer)
