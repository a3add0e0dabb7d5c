"""compare: one model on every engine, each in a process of its own, timed one after another."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import logging
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memopt.api import device_of
from memopt.backends.by_name import BACKENDS
from memopt.comparison.job import Job, Source
from memopt.comparison.pool import ALLOCATOR, Pool
from memopt.comparison.processes import driver_version
from memopt.comparison.progress import Case, Progress
from memopt.comparison.record import Comparison, judged
from memopt.comparison.steps import OPTIMIZERS, Engine

log = logging.getLogger("memopt")

_LIBRARIES = (
    "torch",
    "triton",
    "numpy",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "jax",
    "torchax",
    "tensorflow",
    "tensorflow-cpu",
)


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


def compare_cases(
    cases: Sequence[Case],
    folder: Path,
    *,
    timeout: float,
    jobs: int,
    keep_caches: bool,
    seconds: float | None = None,
    watch: Callable[[list[Comparison]], None] | None = None,
) -> list[Comparison]:
    """Compare several models, `jobs` rows of any of them prepared at a time, in the order given; see `compare`.

    Args:
        cases: the models; every process makes its own.
        folder: where the processes find and leave their files.
        timeout, jobs, keep_caches: as `compare` takes them.
        seconds: after so long whatever has not ended is a row that says so; None: no limit.
        watch: called after every row with what there is so far; models without a row are left out.
    """
    path = tuple(str(Path(entry).resolve()) for entry in sys.path)
    cases = [dataclasses.replace(case, job=dataclasses.replace(case.job, path=path)) for case in cases]
    models = [Progress(case, folder / f"model-{number}") for number, case in enumerate(cases)]
    pool = Pool(folder, timeout, keep_caches, jobs, seconds)
    owners: dict[int, tuple[Progress, Job]] = {}

    def add(model: Progress, new: Sequence[Job]) -> None:
        owners.update(zip(pool.add(new), ((model, job) for job in new), strict=True))

    def found() -> list[Comparison]:
        return [_comparison(model, {"timeout_seconds": timeout, "jobs": jobs, "caches": caches}) for model in models]

    caches = "kept" if keep_caches else "empty"
    for model in models:
        add(model, model.jobs())
    for number, said in pool.run():
        model, job = owners[number]
        add(model, model.take(job, said))
        if job.engine and not job.eval_gradients:
            what = said.get("reason") or f"{statistics.median(said['seconds']) * 1e3:.3f} ms"
            log.info("%s, %s: %s", model.case.title, job.engine, what)
        if watch is not None:
            watch([comparison for comparison in found() if comparison.rows])
    return found()


def _comparison(model: Progress, how: Mapping[str, Any]) -> Comparison:
    job = model.case.job
    settings = {"warmup": job.warmup, "repeats": job.repeats, "optimizer": job.optimizer, **how}
    settings |= {"threads": torch.get_num_threads(), **model.case.settings}
    if job.device.startswith("cuda"):
        settings["allocator"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR)
    return Comparison(
        model=model.case.title,
        mode="training" if job.training else "inference",
        device=_device_name(job.device),
        dtype=job.dtype or "as given",
        rows=judged(model.rows, getattr(torch, job.dtype) if job.dtype else torch.float32),
        settings=settings,
        versions=_versions(job.device),
        notes=model.notes,
    )


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(torch.device(device)))
    return f"{platform.processor() or platform.machine()} (CPU)"


@functools.cache
def _versions(device: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for library in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[library] = importlib.metadata.version(library)
    found["torch"] = torch.__version__  # with what it was built for
    driver = driver_version() if device.startswith("cuda") else None
    return {**found, "driver": driver} if driver else found
