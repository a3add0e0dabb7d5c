"""Torch's profiler: who starts one, as only one can run at a time in a thread; marks in what it records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.profiler as profiling

# What torch.profiler and torch.autograd.profiler call as a profiler of theirs starts; those of these that there are.
_STARTS = ("_prepare_profiler", "_enable_profiler")
_MARKED = "memopt's mark: "


def mark(name: str) -> None:
    """Have the profiler that runs note this moment; no dispatch mode of the user's sees it. Tried on 2.11 and 2.13."""
    with torch._C._profiler._RecordFunctionFast(_MARKED + name):
        pass


def name_of_mark(event: Any) -> str | None:
    """The name that a recorded event was marked with, by `mark` or by `torch.profiler.record_function`; else None."""
    name = str(event.name())
    if name.startswith(_MARKED):
        return name.removeprefix(_MARKED)
    return name if event.is_user_annotation() else None


def before_profilers(call: Callable[[], None]) -> Callable[[], None]:
    """Have `call` called whenever somebody starts a profiler; return what undoes that. Tried on torch 2.11 and 2.13."""
    before = {name: getattr(profiling, name) for name in _STARTS if hasattr(profiling, name)}

    def starting(start: Callable[..., Any]) -> Callable[..., Any]:
        def started(*args: Any, **kwargs: Any) -> Any:
            call()
            return start(*args, **kwargs)

        return started

    after = {name: starting(start) for name, start in before.items()}
    for name, start in after.items():
        setattr(profiling, name, start)

    def undo() -> None:
        for name, start in after.items():
            if getattr(profiling, name) is start:  # else somebody else stands before it, and is let stand
                setattr(profiling, name, before[name])

    return undo


def is_running() -> bool:
    """Whether a profiler is active in this thread; tried on 2.11 and 2.13."""
    return bool(torch._C._autograd._profiler_enabled())


def is_of_cuda(event: Any) -> bool:
    """Whether a recorded event is of a CUDA device; tried on 2.11 and 2.13."""
    return bool(event.device_type() == torch._C._autograd.DeviceType.CUDA)
