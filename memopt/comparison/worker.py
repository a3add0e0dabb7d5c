"""The process of one row: `python -m memopt.comparison.worker JOB.json`."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memopt
from memopt.comparison.blocks import blocks_of, checkpoint_blocks
from memopt.comparison.inside import Seat, serve
from memopt.comparison.job import Job
from memopt.comparison.steps import OPTIMIZERS, Engine, call, loss_of, placed
from memopt.comparison.truth import step_values, truth
from memopt.memory.allocator import pooled_bytes


def work(job: Job, seat: Seat) -> dict[str, Any]:
    """What a row is made of, or, without an engine, the float64 truth."""
    return _row(job, seat) if job.engine else _truth(job, seat)


def _truth(job: Job, seat: Seat) -> dict[str, Any]:
    model, inputs = job.source.load()
    with seat.turn():
        model, inputs = place(job, model, inputs)
        if job.training and torch.device(job.device).type == "cuda" and blocks_of(model):
            checkpoint_blocks(model)  # the same numbers, and four times the bytes of bfloat16 may be too many
        found, is_random = truth(model, inputs, job.training)
    found.save(job.values)
    return {"random": is_random}


def _row(job: Job, seat: Seat) -> dict[str, Any]:
    engine = Engine.parse(job.engine)
    model, inputs = job.source.load()
    cuda = torch.device(job.device).type == "cuda"
    found: dict[str, Any] = {}
    # Peers that compile nothing reach their peak at once; the others do so at a time of their own.
    with seat.turn() if engine.kind in ("eager", "checkpoint") else contextlib.nullcontext():
        model, inputs = place(job, model, inputs)
        model.train(job.training and not job.eval_gradients)
        make = OPTIMIZERS.get(job.optimizer)
        optimizer = make([p for p in model.parameters() if p.requires_grad], lr=1e-3) if make and job.training else None
        began = seat.now()
        run = engine.ready(model, job.training, optimizer)
        first = step_values(run, model, inputs, job.training)
        if cuda:
            torch.cuda.synchronize()
        found["first_seconds"] = seat.now() - began
        release(cuda)
    first.save(job.values)
    del first
    if not job.eval_gradients:
        release(cuda)
        seat.say("ready", device=job.device if cuda else "")
        found.update(timed(job, engine.in_torch_memory, stepper(job, run, model, inputs, optimizer), model))
    report = report_of(run)
    if report is not None:
        found.update(budget_bytes=report.budget_bytes, notes=list(report.notes))
    if report is not None and engine.in_torch_memory:  # others lay memory out in their own way
        found.update(predicted_bytes=report.peak_bytes, minimum_bytes=report.minimum_bytes)
    return found


def stepper(
    job: Job,
    run: Callable[..., Any],
    model: nn.Module,
    inputs: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    waits: bool = True,
) -> Callable[[], None]:
    """One step of the row, which ends when the device has done it, or, unless it waits, once that is all queued."""
    waits = waits and torch.device(job.device).type == "cuda"

    def step() -> None:
        with torch.set_grad_enabled(job.training):
            if job.training:
                model.zero_grad(set_to_none=True)
                torch.autograd.backward([loss_of(call(run, inputs))])
                if optimizer is not None:
                    optimizer.step()
            else:
                call(run, inputs)
        if waits:
            torch.cuda.synchronize()

    return step


def timed(job: Job, in_torch_memory: bool, step: Callable[[], None], model: nn.Module) -> dict[str, Any]:
    """Time the job's steps, after those that warm up, and say what memory they took; see `Row`."""
    for _ in range(job.warmup):
        step()
    if torch.device(job.device).type == "cuda":  # the first of them may have had the allocator take all at once
        torch.cuda.reset_peak_memory_stats()
    _forget_resident_peak()
    seconds = []
    for _ in range(job.repeats):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    found: dict[str, Any] = {"seconds": seconds}
    if torch.device(job.device).type == "cuda":
        if in_torch_memory:
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
            # What a CUDA graph's kernels write to is not allocated, and nothing else can have it.
            pooled = found["pooled_bytes"] = pooled_bytes(torch.device(job.device))
            found["allocated_bytes"] = torch.cuda.max_memory_allocated() + pooled
        return found
    found["process_bytes"] = _resident_peak()
    if in_torch_memory:
        model.zero_grad(set_to_none=True)
        gc.collect()
        found["allocated_bytes"] = _live_bytes() + memopt.measure(step, device=job.device).peak_bytes
    return found


def place(job: Job, model: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    """The model and its inputs, on the device and in the dtype of the job."""
    return placed(model, inputs, torch.device(job.device), getattr(torch, job.dtype) if job.dtype else None)


def report_of(run: Callable[..., Any]) -> memopt.Report | None:
    """What memopt says of its run; None for peers."""
    return run.report if isinstance(run, memopt.CompiledModule) else None


def release(cuda: bool) -> None:
    """Hand memory back to the device, and forget what was its most."""
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _live_bytes() -> int:
    """Bytes of the distinct CPU storages of all tensors that Python knows of: weights, constants, arenas, inputs."""
    found = {}
    for item in gc.get_objects():
        # Not isinstance, which asks lazy objects of other libraries for their class.
        if issubclass(type(item), torch.Tensor) and item.device.type == "cpu" and item.layout is torch.strided:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # fake and functional tensors have no memory
                storage = item.untyped_storage()
                if storage.data_ptr():
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _forget_resident_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _resident_peak() -> int | None:
    """The most resident memory of this process since `_forget_resident_peak`, in bytes; None where Linux is not."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


if __name__ == "__main__":
    serve(sys.argv[1], work)
