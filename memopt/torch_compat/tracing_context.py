"""The trace by torch.compile or AOTAutograd that is under way in this thread; tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
from typing import Any

from torch._guards import TracingContext, detect_fake_mode, tracing


def in_trace() -> bool:
    """Whether a graph is being traced or compiled here."""
    return TracingContext.try_get() is not None


def context() -> Any:
    """What the trace under way knows: its fake mode, its guards, AOTAutograd's metadata.

    Raises:
        RuntimeError: none is under way.
    """
    return TracingContext.get()


def out_of_trace() -> contextlib.AbstractContextManager[Any]:
    """Within: what is compiled or run belongs to no trace that is under way around it."""
    return tracing(None)


def fake_mode_here() -> Any:
    """The mode of fake tensors that is in force, or that of the trace under way; None where there is neither."""
    return detect_fake_mode()
