"""The process of one row: `python -m memopt.comparison.worker JOB.json`.

It speaks in lines of JSON on what was its standard output: `ready` once the first step has run, `row` with what was
found, and waits for a line on standard input after each, so that only one process at a time is timed. What libraries
print goes to standard error.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memopt
from memopt.comparison.job import Job
from memopt.comparison.steps import OPTIMIZERS, Engine, call, loss_of, placed
from memopt.comparison.truth import Values, errors, step_values, truth


def main(path: str) -> None:
    """Do the job in the file."""
    with os.fdopen(os.dup(1), "w") as words:
        os.dup2(2, 1)
        job = Job.read(Path(path))

        def say(kind: str, **content: Any) -> None:
            words.write(json.dumps({"kind": kind, **content}) + "\n")
            words.flush()

        try:
            if not job.engine:
                say("row", **_truth(job))
            else:
                _row(job, say)
        except memopt.BudgetError as error:
            reason = f"refused: the least is {memopt.budget.format_bytes(error.minimum_bytes)}"
            say("row", reason=reason, minimum_bytes=error.minimum_bytes, budget_bytes=error.budget_bytes)
        except Exception as error:
            say("row", reason=_reason(error))
            raise


def _truth(job: Job) -> dict[str, Any]:
    model, inputs = _loaded(job)
    found, is_random = truth(model, inputs, job.training)
    torch.save({"outputs": found.outputs, "gradients": found.gradients}, job.truth)
    return {"random": is_random}


def _row(job: Job, say: Callable[..., None]) -> None:
    engine = Engine.parse(job.engine)
    model, inputs = _loaded(job)
    cuda = torch.device(job.device).type == "cuda"
    model.train(job.training and not job.eval_gradients)
    make = OPTIMIZERS.get(job.optimizer)
    optimizer = make([p for p in model.parameters() if p.requires_grad], lr=1e-3) if make and job.training else None
    found: dict[str, Any] = {}
    started = time.perf_counter()
    run = engine.ready(model, job.training, optimizer)
    first = step_values(run, model, inputs, job.training)
    if cuda:
        torch.cuda.synchronize()
    found["first_seconds"] = time.perf_counter() - started
    if job.truth:
        found["error"], found["gradient_error"] = errors(first, Values(**torch.load(job.truth)))
    del first
    if not job.eval_gradients:
        _release(cuda)
        say("ready", device=_device_id(job) if cuda else "")
        sys.stdin.readline()
        found.update(_timed(job, engine, run, model, inputs, optimizer))
    report = _report(run)
    if report is not None:
        found.update(budget_bytes=report.budget_bytes, notes=list(report.notes))
    if report is not None and engine.in_torch_memory:  # others lay memory out in their own way
        found.update(predicted_bytes=report.peak_bytes, minimum_bytes=report.minimum_bytes)
    say("row", **found)
    sys.stdin.readline()


def _timed(
    job: Job,
    engine: Engine,
    run: Callable[..., Any],
    model: nn.Module,
    inputs: Any,
    optimizer: torch.optim.Optimizer | None,
) -> dict[str, Any]:
    cuda = torch.device(job.device).type == "cuda"

    def step() -> None:
        with torch.set_grad_enabled(job.training):
            if job.training:
                model.zero_grad(set_to_none=True)
                torch.autograd.backward([loss_of(call(run, inputs))])
                if optimizer is not None:
                    optimizer.step()
            else:
                call(run, inputs)
        if cuda:
            torch.cuda.synchronize()

    for _ in range(job.warmup):
        step()
    _forget_resident_peak()
    seconds = []
    for _ in range(job.repeats):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    found: dict[str, Any] = {"seconds": seconds}
    if cuda:
        if engine.in_torch_memory:
            found["allocated_bytes"] = torch.cuda.max_memory_allocated()
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        return found
    found["process_bytes"] = _resident_peak()
    if engine.in_torch_memory:
        model.zero_grad(set_to_none=True)
        gc.collect()
        found["allocated_bytes"] = _live_bytes() + memopt.measure(step, device=job.device).peak_bytes
    return found


def _loaded(job: Job) -> tuple[nn.Module, Any]:
    model, inputs = job.source.load()
    dtype = getattr(torch, job.dtype) if job.dtype else None
    return placed(model, inputs, torch.device(job.device), dtype)


def _report(run: Callable[..., Any]) -> memopt.Report | None:
    return run.report if isinstance(run, memopt.CompiledModule) else None


def _reason(error: BaseException) -> str:
    """The first line that says something, with the exception's kind unless it is plainly about what is missing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return text if "pip install" in text else f"{type(error).__name__}: {text}"[:400]


def _release(cuda: bool) -> None:
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _device_id(job: Job) -> str:
    """The device's name for the driver, whatever CUDA_VISIBLE_DEVICES makes of its number."""
    found = str(getattr(torch.cuda.get_device_properties(torch.device(job.device)), "uuid", ""))
    return found if not found or found.startswith("GPU-") else f"GPU-{found}"


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
    main(sys.argv[1])
