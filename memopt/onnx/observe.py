"""Whoever wants to see each pass's model, before and after: set for a block, whatever runs the passes in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import onnx_ir as ir

Observer = Callable[[str, ir.Model, ir.Model], None]

_observer: ContextVar[Observer | None] = ContextVar("memopt_onnx_observer", default=None)


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call `observer(pass, before, after)` after every pass that runs in the block; one model when nothing changed."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def observed(name: str, before: ir.Model, after: ir.Model) -> None:
    """Tell the observer, if there is one, what a pass did. The models must not be changed."""
    observer = _observer.get()
    if observer is not None:
        observer(name, before, after)
