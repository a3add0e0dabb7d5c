"""Engines by the names that users give them; each is imported when it is asked for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from memopt.backends.aten import AtenBackend
from memopt.budget import Budget
from memopt.engine import Engine

if TYPE_CHECKING:
    from memopt.backends.static import StaticBackend

log = logging.getLogger("memopt")

BACKENDS = ("aten", "inductor", "static", "onnxruntime", "xla", "tensorflow")


def engine_of(
    backend: str | Engine | None, device: torch.device, budget: Budget | None
) -> tuple[Engine, tuple[str, ...]]:
    """The engine with this name, or the one that is given; None: the fastest that works on the device.

    Returns:
        The engine, and notes for the report: why it is another one than was asked for.

    Raises:
        ValueError: no engine has this name, or it keeps no budget and there is one.
    """
    if isinstance(backend, Engine):
        return backend, ()
    if backend == "aten":
        return AtenBackend(), ()
    if backend == "static":
        return _static(device), ()
    if backend in ("inductor", None):
        from memopt.backends.inductor import InductorBackend, missing_compiler

        reason = missing_compiler(device)
        if reason is None:
            return InductorBackend(beside=_static(device) if backend is None else None), ()
        note = f'{reason}: backend "aten" is used instead'
        log.warning("%s", note)
        if backend is not None:
            return AtenBackend(), (note,)
        from memopt.backends.aten_or_static import AtenOrStaticBackend

        return AtenOrStaticBackend(_static(device)), (note,)
    if backend == "onnxruntime":
        from memopt.backends.onnxruntime import OnnxRuntimeBackend

        limit = None if budget is None else budget.bytes
        return OnnxRuntimeBackend(device, share_weights=budget is not None, limit=limit), ()
    if backend == "xla":
        from memopt.backends.xla import XlaBackend

        return XlaBackend(device), ()
    if backend == "tensorflow":
        from memopt.backends.tensorflow import TensorFlowBackend

        if budget is not None:
            raise ValueError("backend 'tensorflow' keeps no budget: use 'xla', whose executables are measured")
        return TensorFlowBackend(device), ()
    raise ValueError(f"unknown backend {backend!r}: use one of {', '.join(BACKENDS)}")


def _static(device: torch.device) -> StaticBackend:
    from memopt.backends.static import StaticBackend

    return StaticBackend(graphs=device.type == "cuda")
