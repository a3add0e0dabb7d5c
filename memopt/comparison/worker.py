"""The process of one row: `python -m memopt.comparison.worker JOB.json`.

It speaks in lines of JSON on what was its standard output: `begins` before the first step, `ran` after it, `ready` to
be timed, and `row` with what was found. After the last two it waits for a line on standard input, so that only one
process at a time is timed. What libraries print goes to standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memopt
from memopt.comparison.blocks import blocks_of, checkpoint_blocks
from memopt.comparison.job import Job
from memopt.comparison.steps import OPTIMIZERS, Engine, call, loss_of, placed
from memopt.comparison.truth import step_values, truth


def main(path: str) -> None:
    """Do the job in the file."""
    with os.fdopen(os.dup(1), "w") as words:
        os.dup2(2, 1)
        _end_with_parent()
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
            say("row", reason=refusal(error), minimum_bytes=error.minimum_bytes, budget_bytes=error.budget_bytes)
        except Exception as error:
            say("row", reason=_reason(error))
            raise


def _truth(job: Job) -> dict[str, Any]:
    model, inputs = job.source.load()
    with _turn(job):
        model, inputs = _placed(job, model, inputs)
        if job.training and torch.device(job.device).type == "cuda" and blocks_of(model):
            checkpoint_blocks(model)  # the same numbers, and four times the bytes of bfloat16 may be too many
        found, is_random = truth(model, inputs, job.training)
    found.save(job.values)
    return {"random": is_random}


def _row(job: Job, say: Callable[..., None]) -> None:
    engine = Engine.parse(job.engine)
    model, inputs = job.source.load()
    cuda = torch.device(job.device).type == "cuda"
    found: dict[str, Any] = {}
    # Peers that compile nothing reach their peak at once; the others do so at a time of their own.
    with _turn(job) if engine.kind in ("eager", "checkpoint") else contextlib.nullcontext():
        model, inputs = _placed(job, model, inputs)
        model.train(job.training and not job.eval_gradients)
        make = OPTIMIZERS.get(job.optimizer)
        optimizer = make([p for p in model.parameters() if p.requires_grad], lr=1e-3) if make and job.training else None
        say("begins")
        run = engine.ready(model, job.training, optimizer)
        first = step_values(run, model, inputs, job.training)
        if cuda:
            torch.cuda.synchronize()
        say("ran")
        _release(cuda)
    first.save(job.values)
    del first
    if not job.eval_gradients:
        _release(cuda)
        say("ready", device=job.device if cuda else "")
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


def _placed(job: Job, model: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    return placed(model, inputs, torch.device(job.device), getattr(torch, job.dtype) if job.dtype else None)


@contextlib.contextmanager
def _turn(job: Job) -> Iterator[None]:
    """Wait until no other process holds much of the device, and let others wait."""
    if not job.turn:
        yield
        return
    with Path(job.turn).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    # Closing the file gave the lock back.


def _end_with_parent() -> None:
    """On Linux, let this process end when the one that started it does, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _report(run: Callable[..., Any]) -> memopt.Report | None:
    return run.report if isinstance(run, memopt.CompiledModule) else None


def _reason(error: BaseException) -> str:
    """The first line that says something, with the exception's kind unless it is plainly about what is missing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return text if "pip install" in text else f"{type(error).__name__}: {text}"[:400]


def refusal(error: memopt.BudgetError) -> str:
    """Why a budget was refused; where its least is within it, what else was in the way."""
    least = memopt.budget.format_bytes(error.minimum_bytes)
    if error.minimum_bytes > error.budget_bytes:
        return f"refused: the least is {least}"
    cause = error.__cause__ or error.__context__
    why = _reason(cause) if cause is not None else "steps took more than was planned"
    return f"refused, though the least, {least}, is within the budget: {why}"


def _release(cuda: bool) -> None:
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
    main(sys.argv[1])
