"""What ONNX Runtime takes: PyTorch's CUDA allocator, which it uses, and its high-water mark on a host.

With a budget on CUDA, ONNX Runtime allocates through PyTorch's caching allocator: one pool for both, no arena beside
it, and every byte is in `torch.cuda.max_memory_allocated`. ONNX Runtime's CPU allocator has no figures; on Linux the
kernel keeps the process's resident high-water mark, which can be reset (proc(5), /proc/[pid]/clear_refs).
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_EMPTY = ctypes.CFUNCTYPE(None)
# The kernel counts resident pages in batches per CPU: what a reading may be off by.
_GRAIN = 2**20


class TorchAllocator:
    """C functions through which ONNX Runtime takes memory of PyTorch's caching allocator, on one stream.

    It has to be the stream on which ONNX Runtime works: a block that is freed goes to that stream again, and where
    PyTorch unmaps cached blocks it waits for their stream alone.

    Attributes:
        error: what PyTorch raised when it had no memory left; None while it had.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.error: BaseException | None = None

        def allocate(size: int) -> int | None:
            try:
                return int(torch.cuda.caching_allocator_alloc(size, device, stream)) if size else None
            except Exception as error:  # C has no exceptions: whoever runs the session raises it again
                self.error = error
                return None

        def free(address: int | None) -> None:
            if address is not None:
                torch.cuda.caching_allocator_delete(address)  # type: ignore[no-untyped-call]

        self._functions = (_ALLOCATE(allocate), _FREE(free), _EMPTY(lambda: None))

    def options(self) -> dict[str, str]:
        """The CUDA provider's options that hand the functions over."""
        names = ("gpu_external_alloc", "gpu_external_free", "gpu_external_empty_cache")
        addresses = (ctypes.cast(function, ctypes.c_void_p).value for function in self._functions)
        return {name: str(address) for name, address in zip(names, addresses, strict=True)}


def peak_of(run: Callable[[], object], device: torch.device) -> int | None:
    """The most bytes that a call took at once above what was there before; None where that cannot be seen.

    On CUDA in bytes of PyTorch's allocator; on Linux hosts in resident pages, rounded up.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before)
    return _resident_peak(run)


def _resident_peak(run: Callable[[], object]) -> int | None:
    reset = Path("/proc/self/clear_refs")
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what is free but resident would hide what the call takes
        reset.write_text("5")
        before = _status("VmRSS")
    except (OSError, AttributeError):
        return None
    run()
    taken = max(0, _status("VmHWM") - before)
    return (taken // _GRAIN + 1) * _GRAIN if before else None


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
