"""What a short piece of work takes on its device, without the host's part where that is hidden in a program."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

_REPEATS, _CALLS = 7, 10


def made_like(value: torch.Tensor, layout: torch.memory_format | None = None) -> torch.Tensor:
    """A tensor of random numbers like a fake one, laid out otherwise where that is asked for, and nothing beside it."""
    kind: Any = {"dtype": value.dtype, "device": value.device}
    if layout is None or value.dim() != 4:
        made = torch.empty_strided(value.shape, value.stride(), **kind)
    else:
        made = torch.empty(value.shape, memory_format=layout, **kind)
    return made.normal_() if value.dtype.is_floating_point else made.zero_()


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """The least time of a call; on CUDA inside one graph, where no launch is waited for.

    Raises:
        RuntimeError: the work cannot be done, or not be captured.
    """
    run()
    cuda = device.type == "cuda"
    call = _graphed(run) if cuda else run

    def once() -> float:
        if cuda:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / (_CALLS if cuda else 1)

    once()
    return min(once() for _ in range(_REPEATS))


def _graphed(run: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            run()
    return graph.replay
