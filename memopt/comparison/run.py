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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from memopt.api import BACKENDS, device_of
from memopt.comparison.job import Job, Source
from memopt.comparison.processes import Worker, WorkerFailed, device_used, driver_version
from memopt.comparison.record import Comparison, Row, judged
from memopt.comparison.steps import OPTIMIZERS, Engine

log = logging.getLogger("memopt")

T = TypeVar("T")

# The same allocator for all rows, and the one that memopt's budgets are kept with.
_ALLOCATOR = "expandable_segments:True"
_EVAL_NOTE = "the training step draws random numbers: errors are those of a step in eval mode, with gradients"
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
            source, title, where = Source(function=model), model, torch.device("cpu")
        else:
            source, title, where = Source.of(model, inputs, folder), type(model).__name__, device_of(model)
        place = str(torch.device(device) if device is not None else where)
        job = Job(
            source,
            "",
            training,
            place,
            "" if dtype is None else str(dtype).removeprefix("torch."),
            optimizer or "",
            warmup,
            repeats,
        )
        case = Case(title, job, tuple(engines))
        return compare_cases([case], folder, timeout=timeout, jobs=jobs, keep_caches=keep_caches)[0]


@dataclasses.dataclass(frozen=True)
class Case:
    """One model to be compared.

    Attributes:
        title: its name in the comparison.
        job: how it is made and run; the engine and the truth are filled in.
        engines: its rows.
        settings: what else was asked for, to be put on record.
    """

    title: str
    job: Job
    engines: tuple[Engine, ...]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def compare_cases(
    cases: Sequence[Case], folder: Path, *, timeout: float, jobs: int, keep_caches: bool
) -> list[Comparison]:
    """Compare several models, `jobs` rows of any of them prepared at a time; see `compare`.

    Args:
        cases: the models; every process makes its own.
        folder: where the processes find and leave their files.
        timeout, jobs, keep_caches: as `compare` takes them.
    """
    launcher = _Launcher(folder, timeout, keep_caches, max(1, jobs))
    plain = [dataclasses.replace(case.job, path=tuple(_search_path())) for case in cases]
    truths = launcher.truths(plain)
    timed = [
        dataclasses.replace(job, engine=engine.name, truth="" if truth.in_eval_mode else truth.file)
        for case, job, truth in zip(cases, plain, truths, strict=True)
        for engine in case.engines
    ]
    rows = launcher.rows(timed)
    again = [
        dataclasses.replace(job, engine=engine.name, truth=truth.file, eval_gradients=True)
        if truth.in_eval_mode
        else None
        for case, job, truth in zip(cases, plain, truths, strict=True)
        for engine in case.engines
    ]
    left = iter(launcher.with_errors(rows, again))
    found = []
    for case, truth in zip(cases, truths, strict=True):
        own = tuple(next(left) for _ in case.engines)
        given = {"warmup": case.job.warmup, "repeats": case.job.repeats, "optimizer": case.job.optimizer}
        given |= {"timeout_seconds": timeout, "jobs": jobs, "caches": "kept" if keep_caches else "empty"}
        given |= {"threads": torch.get_num_threads(), **case.settings}
        if case.job.device.startswith("cuda"):
            given["allocator"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", _ALLOCATOR)
        found.append(
            Comparison(
                model=case.title,
                mode="training" if case.job.training else "inference",
                device=_device_name(case.job.device),
                dtype=case.job.dtype or "as given",
                rows=judged(own, getattr(torch, case.job.dtype) if case.job.dtype else torch.float32),
                settings=given,
                versions=_versions(case.job.device),
                notes=truth.notes,
            )
        )
    return found


@dataclasses.dataclass(frozen=True)
class _Truth:
    """The file of a float64 truth (empty: there is none), of the timed step or of one in eval mode instead."""

    file: str
    in_eval_mode: bool
    notes: tuple[str, ...]


class _Launcher:
    def __init__(self, folder: Path, timeout: float, keep_caches: bool, jobs: int) -> None:
        self.folder, self.timeout, self.keep_caches, self.jobs = folder, timeout, keep_caches, jobs
        self._started = 0

    def start(self, job: Job) -> Worker:
        self._started += 1
        name = f"{self._started:03}"
        environment = {"PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", _ALLOCATOR)}
        environment["KINETO_LOG_LEVEL"] = "99"  # the profiler's own lines
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # or its figures would be three quarters of the device
        if self.jobs > 1:  # or each of them would start a compiler per core
            threads = max(1, (os.cpu_count() or 1) // self.jobs)
            environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
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

    def groups(self, jobs: Sequence[T]) -> Iterator[Sequence[T]]:
        for first in range(0, len(jobs), self.jobs):
            yield jobs[first : first + self.jobs]

    def truths(self, jobs: Sequence[Job]) -> list[_Truth]:
        found = []
        numbered = [
            dataclasses.replace(job, truth=str(self.folder / f"truth-{number}.pt")) for number, job in enumerate(jobs)
        ]
        for group in self.groups(numbered):
            with self.started(group) as workers:
                for job, worker in zip(group, workers, strict=True):
                    said = _said(worker)
                    if "reason" in said:
                        note = f"errors are not known: no float64 reference ({said['reason']})"
                        found.append(_Truth("", False, (note,)))
                    else:
                        found.append(_Truth(job.truth, said["random"], (_EVAL_NOTE,) if said["random"] else ()))
        return found

    def rows(self, jobs: Sequence[Job]) -> list[Row]:
        """Prepare a group at once, then time one after another."""
        rows = []
        for group in self.groups(jobs):
            with self.started(group) as workers:
                said = [_said(worker) for worker in workers]
                for job, worker, ready in zip(group, workers, said, strict=True):
                    rows.append(_row(job.engine, ready if ready["kind"] == "row" else _timed(worker, ready["device"])))
                    log.info("%s: %s", job.engine, rows[-1].reason or f"{(rows[-1].median or 0) * 1e3:.3f} ms")
        return rows

    def with_errors(self, rows: Sequence[Row], jobs: Sequence[Job | None]) -> list[Row]:
        """The rows with the errors that the jobs, other processes of the same engines, find."""
        found = list(rows)
        places = [(index, job) for index, job in enumerate(jobs) if job is not None and not rows[index].reason]
        for group in self.groups(places):
            with self.started([job for _, job in group]) as workers:
                for (index, _), worker in zip(group, workers, strict=True):
                    row, said = rows[index], _said(worker)
                    if "reason" in said:
                        note = f"its error is not known: {said['reason']}"
                        found[index] = dataclasses.replace(row, notes=(*row.notes, note))
                    else:
                        errors = {"error": said["error"], "gradient_error": said["gradient_error"]}
                        found[index] = dataclasses.replace(row, **errors)
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
