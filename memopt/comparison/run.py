"""compare: one model on every engine, each in a process of its own, timed one after another."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memopt.api import BACKENDS
from memopt.comparison.job import Job, Source
from memopt.comparison.processes import Worker, WorkerFailed, device_used, driver_version
from memopt.comparison.record import Comparison, Row, judged
from memopt.comparison.steps import OPTIMIZERS, Engine

log = logging.getLogger("memopt")

# The same allocator for all rows, and the one that memopt's budgets are kept with.
_ALLOCATOR = "expandable_segments:True"
_LIBRARIES = ("torch", "triton", "numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "jax", "tensorflow")


def compare(
    model: nn.Module | str,
    inputs: Any = None,
    *,
    backends: Sequence[str] = BACKENDS,
    peers: Sequence[str] = ("eager", "compile"),
    budgets: Sequence[str | int] = (),
    train: bool | None = None,
    optimizer: str | None = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    warmup: int = 3,
    repeats: int = 20,
    timeout: float = 600.0,
    jobs: int = 1,
    keep_caches: bool = False,
) -> Comparison:
    """Run one model on several engines and compare time, memory, time to compile and error against float64.

    Each engine runs in a process of its own. One that is missing, fails, crashes or does not end in time is a row that
    says so. Errors are taken against eager PyTorch in float64 on the same weights, rounded to the model's dtype; where
    a training step draws random numbers, in a step in eval mode with gradients.

    Args:
        model: a module that can be pickled; or "package.module:factory", a function that returns (model, inputs).
        inputs: keyword arguments as a mapping, positional ones as a tuple or list, or one tensor; None with a factory.
        backends: memopt's engines.
        peers: what to put beside them: "eager", "compile" (torch.compile), "compile:0.5" (with that
            activation_memory_budget), "checkpoint" (eager with every block in torch.utils.checkpoint).
        budgets: for training: each of memopt's engines is run once more for every budget, as `memopt.compile` takes it.
        train: whether a step has a backward; None: as the model's own mode says (a factory's: inference).
        optimizer: "adamw" or "sgd": it steps in a training step. None: forward and backward only.
        device: "cpu" or a CUDA device; None: the model's own.
        dtype: of parameters and floating-point inputs; None: as they are.
        warmup, repeats: steps run first, and steps timed.
        timeout: seconds that the preparation of a row may take, and its timed steps again.
        jobs: how many rows are prepared at the same time; they are timed one after another in any case.
        keep_caches: whether compilers may find what earlier runs left; else every row compiles from nothing.

    Raises:
        ValueError: an unknown engine, peer, budget or optimizer, or a model that cannot be sent to another process.
    """
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}: use one of {', '.join(OPTIMIZERS)}")
    training = train if train is not None else isinstance(model, nn.Module) and model.training
    if budgets and not training:
        raise ValueError("budgets are for a training step: train=True")
    names = [*peers, *backends, *(f"{backend}:{budget}" for backend in backends for budget in budgets)]
    engines = [Engine.parse(str(name)) for name in dict.fromkeys(names)]
    with tempfile.TemporaryDirectory(prefix="memopt-compare-") as made:
        folder = Path(made)
        if isinstance(model, str):
            source, title = Source(function=model), model
        else:
            source, title = Source.of(model, inputs, folder), type(model).__name__
        place = str(torch.device(device) if device is not None else _device_of(model))
        return compare_source(
            source,
            engines,
            folder,
            title=title,
            training=training,
            optimizer=optimizer or "",
            device=place,
            dtype="" if dtype is None else str(dtype).removeprefix("torch."),
            warmup=warmup,
            repeats=repeats,
            timeout=timeout,
            jobs=jobs,
            keep_caches=keep_caches,
        )


def compare_source(
    source: Source,
    engines: Sequence[Engine],
    folder: Path,
    *,
    title: str,
    training: bool,
    optimizer: str,
    device: str,
    dtype: str,
    warmup: int,
    repeats: int,
    timeout: float,
    jobs: int,
    keep_caches: bool,
    settings: dict[str, Any] | None = None,
) -> Comparison:
    """Run the rows of a model that every process makes for itself; see `compare`. Files are kept in `folder`."""
    job = Job(source, "", training, device, dtype, optimizer, warmup, repeats, path=tuple(_search_path()))
    launcher = _Launcher(folder, timeout, keep_caches)
    reference, eval_reference, notes = launcher.truth(job)
    job = dataclasses.replace(job, truth=reference)
    rows: list[Row] = []
    for first in range(0, len(engines), max(1, jobs)):
        rows += launcher.group([dataclasses.replace(job, engine=item.name) for item in engines[first : first + jobs]])
    if eval_reference:
        with_errors = dataclasses.replace(job, truth=eval_reference, eval_gradients=True)
        for first in range(0, len(rows), max(1, jobs)):
            rows[first : first + jobs] = launcher.with_errors(with_errors, rows[first : first + jobs])
    given = {"warmup": warmup, "repeats": repeats, "timeout_seconds": timeout, "jobs": jobs, "optimizer": optimizer}
    given |= {"caches": "kept" if keep_caches else "empty", "threads": torch.get_num_threads(), **(settings or {})}
    if device.startswith("cuda"):
        given["allocator"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", _ALLOCATOR)
    plain = getattr(torch, dtype) if dtype else torch.float32
    return Comparison(
        model=title,
        mode="training" if training else "inference",
        device=_device_name(device),
        dtype=dtype or "as given",
        rows=judged(tuple(rows), plain),
        settings=given,
        versions=_versions(device),
        notes=tuple(notes),
    )


class _Launcher:
    def __init__(self, folder: Path, timeout: float, keep_caches: bool) -> None:
        self.folder, self.timeout, self.keep_caches = folder, timeout, keep_caches
        self._started = 0

    def start(self, job: Job) -> Worker:
        self._started += 1
        name = f"{self._started:03}"
        environment = {"PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", _ALLOCATOR)}
        environment["KINETO_LOG_LEVEL"] = "99"  # the profiler's own lines
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # or its figures would be three quarters of the device
        if not self.keep_caches:
            caches = self.folder / f"caches-{name}"
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
            environment["TRITON_CACHE_DIR"] = str(caches / "triton")
            environment["MEMOPT_CACHE_DIR"] = str(caches / "memopt")
        return Worker(job, self.folder, name, self.timeout, environment)

    @contextlib.contextmanager
    def started(self, jobs: Sequence[Job]) -> Iterator[list[Worker]]:
        workers: list[Worker] = []
        try:
            for job in jobs:
                workers.append(self.start(job))
            yield workers
        finally:
            for worker in workers:
                worker.end()

    def truth(self, job: Job) -> tuple[str, str, list[str]]:
        """The files of the truths for the timed step, or for one in eval mode instead; and what went wrong."""
        path = str(self.folder / "truth.pt")
        with self.started([dataclasses.replace(job, truth=path)]) as (worker,):
            try:
                said = worker.expect()
            except WorkerFailed as error:
                said = {"reason": str(error)}
        if "reason" in said:
            return "", "", [f"errors are not known: no float64 reference ({said['reason']})"]
        if said["random"]:
            note = "the training step draws random numbers: errors are those of a step in eval mode, with gradients"
            return "", path, [note]
        return path, "", []

    def group(self, jobs: Sequence[Job]) -> list[Row]:
        """Prepare all at once, then time one after another."""
        rows = []
        with self.started(jobs) as workers:
            said = [_said(worker) for worker in workers]
            for job, worker, ready in zip(jobs, workers, said, strict=True):
                rows.append(_row(job.engine, ready if ready["kind"] == "row" else _timed(worker, ready["device"])))
                log.info("%s: %s", job.engine, rows[-1].reason or f"{(rows[-1].median or 0) * 1e3:.3f} ms")
        return rows

    def with_errors(self, job: Job, rows: Sequence[Row]) -> list[Row]:
        """The rows with the errors that other processes of the same engines find."""
        found = list(rows)
        places = [index for index, row in enumerate(rows) if not row.reason]
        with self.started([dataclasses.replace(job, engine=rows[index].name) for index in places]) as workers:
            for index, worker in zip(places, workers, strict=True):
                row, said = rows[index], _said(worker)
                if "reason" in said:
                    note = f"its error is not known: {said['reason']}"
                    found[index] = dataclasses.replace(row, notes=(*row.notes, note))
                else:
                    found[index] = dataclasses.replace(row, error=said["error"], gradient_error=said["gradient_error"])
        return found


def _said(worker: Worker) -> dict[str, Any]:
    try:
        return worker.expect()
    except WorkerFailed as error:
        return {"kind": "row", "reason": str(error)}


def _timed(worker: Worker, device: str) -> dict[str, Any]:
    """Let a prepared process be timed, and see what the device gets back when it ends."""
    worker.go()
    said = _said(worker)
    if "reason" in said or not device:
        return said
    held = device_used(device)
    worker.go()
    worker.wait()
    left = device_used(device)
    return said if held is None or left is None else {**said, "process_bytes": held - left}


def _row(name: str, said: dict[str, Any]) -> Row:
    fields = {field.name for field in dataclasses.fields(Row)}
    content: dict[str, Any] = {"name": name}
    content |= {key: tuple(value) if isinstance(value, list) else value for key, value in said.items() if key in fields}
    return Row(**content)


def _search_path() -> list[str]:
    return [str(Path(entry).resolve()) for entry in sys.path]


def _device_of(model: nn.Module | str) -> torch.device:
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            return tensor.device
    return torch.device("cpu")


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(torch.device(device)))
    return f"{platform.processor() or platform.machine()} (CPU)"


def _versions(device: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for library in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[library] = importlib.metadata.version(library)
    driver = driver_version() if device.startswith("cuda") else None
    return {**found, "driver": driver} if driver else found
