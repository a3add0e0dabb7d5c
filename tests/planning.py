"""How tests plan: with searches that a count of operations ends, and by costs that are the same on every machine."""

from __future__ import annotations

import os
import types
from pathlib import Path

import pytest

from memopt.calls.residents import Residents
from memopt.memory.cost import measure, roofline
from memopt.memory.cost.devices import CPU, typical
from memopt.memory.cost.table import CostTable
from memopt.solve import recompute, search
from memopt.solve.rollout import Rollout
from memopt.step import exact_trial, solver_pool
from memopt.step.around import Around
from memopt.step.before_calls import BeforeCalls

# What one operation of a search counts for, of the seconds that it is given: about what it takes.
_PLAYED = 1e-5
# How many operations a search may play out, and vain rounds per level.
_EFFORT, _PATIENCE = 15_000, 4


def brief_searches(patch: pytest.MonkeyPatch) -> None:
    """End searches early, by a count of operations and not by the time: the plan is the same on a busy machine."""
    patch.setattr(recompute, "EFFORT", _EFFORT)
    patch.setattr(recompute, "PATIENCE", _PATIENCE)
    patch.setenv("BRIEF_SEARCHES", f"{_EFFORT},{_PATIENCE}")  # in the processes that a test starts, too
    patch.setenv("PYTHONPATH", str(Path(__file__).with_name("started")), prepend=os.pathsep)
    patch.setattr(recompute, "_SINKING", 2.0)  # of a slow machine's time the floor gets what it takes
    patch.setattr(solver_pool, "_cores", lambda: 1)  # none in another process, which would take its time
    seconds, play = [0.0], Rollout.play

    def counted(rollout, saved, hold):
        outcome = play(rollout, saved, hold)
        seconds[0] += _PLAYED * len(outcome.steps)
        return outcome

    patch.setattr(Rollout, "play", counted)
    patch.setattr(search, "time", types.SimpleNamespace(thread_time=lambda: seconds[0]))


def costs_by_figures(patch: pytest.MonkeyPatch) -> None:
    """Take the times of operators on a CPU from figures; their bytes are measured all the same."""
    patch.setattr(CostTable, "_place", lambda self, device: f"{device} by figures")  # apart from other processes'
    patch.setattr(CostTable, "_calibrated", lambda self, device, place: typical(device.type))
    patch.setattr(measure, "_timed", lambda node, *rest: roofline.seconds(node, CPU))


def alone(patch: pytest.MonkeyPatch) -> None:
    """Count nothing of the process but what a model's steps take themselves."""
    patch.setattr(Residents, "look_around", lambda self, args, kwargs: None)
    patch.setattr(BeforeCalls, "expect", lambda self, device, owner, *, in_steps: None)
    patch.setattr(BeforeCalls, "follow", lambda self, device, owner, *, in_steps: None)
    patch.setattr(exact_trial, "live_bytes", lambda device: 0)
    patch.setattr(exact_trial, "collect", lambda: None)  # for these bytes alone, and `measure` does one right after
    patch.setattr(Around, "took_after", lambda self: 0)
