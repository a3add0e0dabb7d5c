"""Shapes are fixed while Dynamo traces, whatever the user marked: plans are made for the bytes of every tensor."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from typing import Any

import torch
from torch._dynamo.variables import builder

from memopt.common.scoped import scoped

_static = contextvars.ContextVar("static", default=False)


def static_shapes() -> contextlib.AbstractContextManager[None]:
    """Within: a plain tensor is traced at its own shape, also one that `mark_dynamic` or `mark_unbacked` names.

    Elsewhere marks are as ever. Tensor subclasses, nested ones say, have the symbols that they need. Tried on 2.13.
    """
    _install()
    return scoped(_static, True)


@functools.cache
def _install() -> None:
    """Ask before Dynamo decides upon the sizes of a tensor, once in a process."""
    room: Any = builder
    decide = getattr(room, "_automatic_dynamic", None)
    if decide is None:
        return

    def decided(e: Any, tx: Any, source: Any, static_shapes: bool, *args: Any, **kwargs: Any) -> Any:
        fixed = _static.get() and type(e) in (torch.Tensor, torch.nn.Parameter)
        return decide(e, tx, source, static_shapes or fixed, *args, **kwargs)

    room._automatic_dynamic = decided
