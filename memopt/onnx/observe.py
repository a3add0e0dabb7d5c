"""Whoever wants to see each pass's model, before and after: set for a block, whatever runs the passes in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextvars import ContextVar

import onnx_ir as ir

from memopt.common.scoped import scoped

Observer = Callable[[str, ir.Model, ir.Model], None]

_observer: ContextVar[Observer | None] = ContextVar("memopt_onnx_observer", default=None)


def observing(observer: Observer) -> contextlib.AbstractContextManager[None]:
    """Call `observer(pass, before, after)` after every pass that runs in the block; one model when nothing changed."""
    return scoped(_observer, observer)


def observed(name: str, before: ir.Model, after: ir.Model) -> None:
    """Tell the observer, if there is one, what a pass did. The models must not be changed."""
    observer = _observer.get()
    if observer is not None:
        observer(name, before, after)
