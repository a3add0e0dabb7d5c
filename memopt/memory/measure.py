"""What a call really takes: device bytes above the start, as the allocator saw them, and seconds."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

from memopt.memory.allocator_events import record
from memopt.torch_compat import pytree

T = TypeVar("T")

_measuring = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Measurement(Generic[T]):
    """What one call took.

    Attributes:
        value: what the call returned.
        peak_bytes: the most bytes that were allocated on the device at once, above the start.
        end_bytes: bytes still allocated at the end, above the start: the value, and what the call left behind.
        seconds: wall time, the device's work included; on CPU the profiler's too, some microseconds an operator.
        reserved_bytes: CUDA only: the most bytes that the caching allocator held from the driver at any moment, in all,
            fragmentation included and earlier memory too. None on CPU.
        timeline: bytes above the start after each allocation and each release, in order; None unless asked for.
    """

    value: T
    peak_bytes: int
    end_bytes: int
    seconds: float
    reserved_bytes: int | None = None
    timeline: tuple[int, ...] | None = None


def measure(
    fn: Callable[..., T],
    *args: Any,
    device: torch.device | str | None = None,
    timeline: bool = False,
    **kwargs: Any,
) -> Measurement[T]:
    """Call `fn(*args, **kwargs)` once and return what it took, in exact bytes of the device's allocator.

    On CPU these are bytes asked for; on CUDA, rounded up as the caching allocator rounds. Releases of memory allocated
    before the call are not seen on CPU, and lower the figures on CUDA. On CPU only this thread is seen, with autograd's
    work for it; on CUDA everything that happens on the device meanwhile. CUDA's cache is emptied first, so that
    `reserved_bytes` holds no leftovers of earlier work.

    Args:
        fn: called once. A first call may take more than later ones (compilation, caches): call it before to exclude it.
        args: given to `fn`.
        device: "cpu" or a CUDA device; None: that of the first tensor or module in `fn` and its arguments, else CPU.
        timeline: also record every change (on CUDA by the profiler, which slows the call).
        kwargs: given to `fn`.

    Raises:
        RuntimeError: the call is made inside another `measure` or inside a profiler, which would mix their figures.
        ValueError: the device is neither CPU nor CUDA.
        Exception: whatever `fn` raises; the profiler is stopped by then.
    """
    place = _device(device, (fn, args, kwargs))

    def call() -> T:
        return fn(*args, **kwargs)

    if not _measuring.acquire(blocking=False):
        raise RuntimeError("measure() is already running: the figures of the two calls would mix")
    try:
        gc.collect()  # garbage of earlier work must not be released in the middle
        return _measure_cuda(call, place, timeline) if place.type == "cuda" else _measure_cpu(call, place, timeline)
    finally:
        _measuring.release()


def _measure_cpu(call: Callable[[], T], device: torch.device, timeline: bool) -> Measurement[T]:
    trace = record(call, device)
    sums = tuple(itertools.accumulate(size for _, size in trace.changes))
    return Measurement(
        trace.value,
        peak_bytes=max((0, *sums)),
        end_bytes=sums[-1] if sums else 0,
        seconds=trace.seconds,
        timeline=sums if timeline else None,
    )


def _measure_cuda(call: Callable[[], T], device: torch.device, timeline: bool) -> Measurement[T]:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    sums = None
    if timeline:
        trace = record(call, device)
        value, seconds = trace.value, trace.seconds
        sums = tuple(itertools.accumulate(size for _, size in trace.changes))
    else:
        began = time.perf_counter()
        value = call()
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    return Measurement(
        value,
        peak_bytes=torch.cuda.max_memory_allocated(device) - start,
        end_bytes=torch.cuda.memory_allocated(device) - start,
        seconds=seconds,
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        timeline=sums,
    )


def _device(device: torch.device | str | None, where: Any) -> torch.device:
    found = torch.device(device) if device is not None else next(_devices(where), torch.device("cpu"))
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"measure() knows cpu and cuda, not {found}")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _devices(where: Any) -> Iterator[torch.device]:
    for leaf in pytree.tree_leaves(where):
        if isinstance(leaf, torch.Tensor):
            yield leaf.device
        elif isinstance(leaf, torch.nn.Module):
            yield from (tensor.device for tensor in itertools.chain(leaf.parameters(), leaf.buffers()))
