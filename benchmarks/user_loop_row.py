"""The process of one row of user_loop.py: a user's loop with one engine, and what it held from the first byte on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from user_models import batches, built

import memopt
from memopt.comparison.inside import Seat, serve
from memopt.comparison.job import Job
from memopt.module import CompiledModule, calls_of

BATCHES = 4


def made(name: str, tiny: bool) -> tuple[nn.Module, None]:
    """The model; its batches are made once it is on its device."""
    return built(name, tiny=tiny), None


def work(job: Job, seat: Seat) -> dict[str, Any]:
    """Run the loop for `losses` steps, wait to be timed, then for `repeats` more."""
    os.nice(job.more["niceness"])
    cuda = job.device.startswith("cuda")
    model, _ = job.source.load()
    model.to(job.device)
    given = batches(
        job.source.arguments["name"],
        job.more["pairs"] or BATCHES,
        job.more["sizes"],
        tiny=job.source.arguments["tiny"],
        device=job.device,
        varied=job.more["pairs"] > 0,
    )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
    run = prepared(job, model, optimizer)

    def step(number: int) -> torch.Tensor:
        with torch.autocast(job.device.partition(":")[0], torch.bfloat16):
            loss = run(**given[number % len(given)]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()  # type: ignore[no-any-return]

    began = seat.now()
    losses = [float(step(0))]
    found: dict[str, Any] = {"first_step_seconds": seat.now() - began}
    if cuda:
        found["first_step_reserved_bytes"] = torch.cuda.max_memory_reserved()
    waited = [found["first_step_seconds"]]
    for number in range(1, job.more["losses"]):
        started = seat.now()
        losses.append(float(step(number)))
        waited.append(seat.now() - started)
    seat.say("ready", device=job.device if cuda else "")
    seconds = []
    for number in range(job.warmup + job.repeats):
        started = time.perf_counter()
        step(number)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    found.update(seconds=seconds[job.warmup :], losses=losses, loss_seconds=waited)
    if cuda:  # of the process's whole life: who plans a later step sets the most back
        found["reserved_bytes"] = max(found["first_step_reserved_bytes"], torch.cuda.max_memory_reserved())
        found["allocated_bytes"] = torch.cuda.max_memory_allocated()
    report = getattr(run, "report", None)
    if isinstance(report, memopt.Report):
        found.update(predicted_bytes=report.peak_bytes, minimum_bytes=report.minimum_bytes, notes=list(report.notes))
        found.update(budget_bytes=report.budget_bytes, phases=dict(report.seconds))
    found["graphs"] = calls_of(run).sessions.graphs if isinstance(run, CompiledModule) else traced_graphs()
    return found


def traced_graphs() -> int:
    """How many graphs torch.compile has made code of in this process."""
    return int(counters["stats"]["unique_graphs"])


def prepared(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """What the loop calls: the model as the row's engine has it."""
    kind, _, option = job.engine.partition(":")
    dynamic = True if kind.endswith("_dynamic") else None
    if kind.startswith("checkpoint"):
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    if kind == "eager" or kind == "checkpoint":
        return model
    if kind.startswith("memopt"):
        budget = job.more["budget_bytes"]
        text = None if budget is None else f"{budget}B"
        return memopt.compile(model, budget=text, optimizer=optimizer, dynamic=dynamic)
    if option:
        functorch_config.activation_memory_budget = float(option)
    return torch.compile(model, dynamic=dynamic)


if __name__ == "__main__":
    serve(sys.argv[1], work)
