"""Who starts a profiler of torch's: only one can run at a time in a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.autograd.profiler as profiling

# What torch.profiler and torch.autograd.profiler call as a profiler of theirs starts; those of these that there are.
_STARTS = ("_prepare_profiler", "_enable_profiler")


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
