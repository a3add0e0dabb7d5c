"""Torch's profiler: memory alone is recorded by it; who starts one, as only one can run at a time in a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.profiler as profiling

# What torch.profiler and torch.autograd.profiler call as a profiler of theirs starts; those of these that there are.
_STARTS = ("_prepare_profiler", "_enable_profiler")
_NOWHERE = torch._C._profiler.RecordScope.STATIC_RUNTIME_MODEL  # a scope that nothing here records in


def begin_memory_profile() -> None:
    """Begin to record the allocators' events of this thread, and nothing else. Tried on torch 2.11, 2.13 and 2.14.

    No region is observed (operators, `record_function`): where a profile has ended within a region and another one is
    active as the region ends, torch writes a thread's number and times into freed memory, which others hold by then.
    """
    profile = profiling.profile(use_kineto=True, profile_memory=True)  # not torch.profiler.profile: it warns on some
    config, activities = profile.config(), profile.kineto_activities  # type: ignore[no-untyped-call]
    torch._C._autograd._prepare_profiler(config, activities)
    torch._C._autograd._enable_profiler(config, activities, {_NOWHERE})  # type: ignore[call-arg]


def end_memory_profile() -> Any:
    """End it; return what was recorded, as kineto's results."""
    return torch._C._autograd._disable_profiler()


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
