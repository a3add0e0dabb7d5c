"""Searches for another process: problems in, curves out. Imports no torch, so that such a process is there at once."""

from __future__ import annotations

import pickle
import sys

from memopt.solve.problem import StepProblem
from memopt.solve.recompute import Curve, curve

# A problem and the seconds for its search.
Job = tuple[StepProblem, float]


def searched(jobs: list[Job]) -> list[Curve]:
    """The trade-off of each problem, one after the other."""
    return [curve(problem, seconds=seconds) for problem, seconds in jobs]


def serve() -> None:
    """Search what standard input asks for, once, and put the curves on standard output."""
    pickle.dump(searched(pickle.load(sys.stdin.buffer)), sys.stdout.buffer)
