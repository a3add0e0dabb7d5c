"""The process of one row of training.py: a peer's or memopt's step, with all that memopt says of it."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import Callable
from typing import Any

import clocks
import kernels
import torch
from building import built

import memopt
from memopt.comparison.inside import Seat, serve
from memopt.comparison.job import Job
from memopt.comparison.steps import Engine
from memopt.comparison.worker import place, release, report_of, stepper, timed
from memopt.memory.allocator import retries_of
from memopt.passes.offload import Offload

# Phases of `report.seconds` in which code is made; the rest of them is planning.
COMPILING = ("generating code", "compiling kernels")
# Seconds of steps on a GPU before any is timed: its clock falls for about one, once it reaches its power limit.
_SETTLING = 2.0


def made(name: str, device: str, dtype: str, changes: dict[str, Any], inputs: dict[str, int]) -> tuple[Any, Any]:
    """The model and its inputs."""
    model = built(name, device, dtype, **changes)
    return model.train(), model.example_inputs(labels=True, **inputs)


def work(job: Job, seat: Seat) -> dict[str, Any]:
    os.nice(job.more["niceness"])
    kind = job.engine.partition(":")[0]
    cuda = torch.device(job.device).type == "cuda"
    model, inputs = job.source.load()
    found: dict[str, Any] = {}

    def first_step(budget: int | None) -> Any:
        if kind == "memopt":
            passes = (*memopt.TRAINING, Offload()) if job.more["offload"] else None
            run: Any = memopt.compile(model, f"{budget}B", backend=job.more["backend"], passes=passes)
        else:
            run = Engine.parse(job.engine).ready(model, True, None)
        stepper(job, run, model, inputs)()
        return run

    # Peers that compile nothing reach their peak at once; the others do so at a time of their own.
    with seat.turn() if kind in ("eager", "checkpoint") else contextlib.nullcontext():
        model, inputs = place(job, model, inputs)
        if cuda:
            torch.cuda.synchronize()
        began = seat.now()
        run = within_least(first_step) if job.engine == "memopt:least" else first_step(job.more["budget_bytes"])
        found["first_step_seconds"] = seat.now() - began
        model.zero_grad()
        release(cuda)
    seat.say("ready", device=job.device if cuda else "")
    step = stepper(job, run, model, inputs)
    found.update(timed_settled(job, step, model) if cuda else timed(job, True, step, model))
    report = report_of(run)
    if report is not None:
        found.update(predicted_bytes=report.peak_bytes, minimum_bytes=report.minimum_bytes, notes=list(report.notes))
        found.update(budget_bytes=report.budget_bytes, phases=dict(report.seconds))
        found["changes"] = {record.name: len(record.changes) for record in report.passes if record.changes}
        found["compile_seconds"] = sum(report.seconds.get(phase, 0.0) for phase in COMPILING)
        found["planning_seconds"] = sum(report.seconds.values()) - found["compile_seconds"]
    if job.more["profile"] or cuda:
        profile = kernels.profiled(step, job.device)
        found["kernels_seconds"] = profile["busy"]
        if job.more["profile"]:
            queue = stepper(job, run, model, inputs, waits=False)
            wait = torch.cuda.synchronize if cuda else lambda: None
            found["profile"] = {**profile, "host": kernels.host_seconds(queue, wait, 3)}
    return found


def timed_settled(job: Job, step: Callable[[], None], model: Any) -> dict[str, Any]:
    """Time steps on a GPU once its clock has settled, and watch that."""
    device = torch.device(job.device)
    with clocks.Clocks(str(torch.cuda.get_device_properties(device).uuid)) as watched:
        clocks.settled(step, _SETTLING)
        began, retried = datetime.datetime.now(), retries_of(device)
        found = timed(job, True, step, model)
        found.update(watched.since(began))
        found["retries_per_step"] = (retries_of(device) - retried) / (job.warmup + job.repeats)
    return found


def within_least(first_step: Callable[[int], Any]) -> Any:
    """The first step within the least that memopt says it can do, plus 2 %: what it says may rise once it is tried."""
    budget = 1
    for left in reversed(range(4)):
        try:
            return first_step(budget)
        except memopt.BudgetError as error:
            if not left:
                raise
            budget = max(budget, int(error.minimum_bytes * 1.02))
        torch._dynamo.reset()


if __name__ == "__main__":
    serve(sys.argv[1], work)
