"""What CUDA's caching allocator holds beyond the tensors of a step: libraries' own buffers, and slack."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch

from memopt.common.garbage import collect
from memopt.common.quiet import without_lines
from memopt.torch_compat.cuda_memory import allocator_settings, free_workspaces
from memopt.torch_compat.fake_tensors import no_fake_mode

# What cuBLAS was seen to keep on Hopper: one buffer per thread that multiplies, forward's and autograd's.
_LIBRARIES = 65 * 2**20
# Granularity of a small and of a large segment, the last of which may be almost empty.
_SEGMENTS = 22 * 2**20
OWN_SEGMENT = 10 * 2**20  # smaller blocks share segments
_SHARE = 1000  # limit / _SHARE is lost between blocks, with expandable segments
# Segments grow by pages, by default of so many bytes, and a page that holds anything cannot be handed back: the
# smallest that torch takes are set where it takes any.
_PAGE, _LEAST_PAGE = 20 * 2**20, 12 * 2**20
_NO_POOL = (0, 0)  # of segments that no CUDA graph was captured in
# Bytes that libraries were seen to keep beyond what was measured, by device.
_further: dict[int, int] = {}


def index_of(device: torch.device) -> int:
    """The number of a CUDA device; the current one's where it has none."""
    return device.index if device.index is not None else torch.cuda.current_device()


def library_bytes(device: torch.device) -> int:
    """Bytes that libraries keep of the allocator's memory once a step has run: buffers of cuBLAS. 0 on CPU.

    Measured once per device where it is here; else what was seen on an H100.
    """
    if device.type != "cuda":
        return 0
    if not torch.cuda.is_available():
        return _LIBRARIES
    index = index_of(device)
    return _measured(index) + _further.get(index, 0)


def count_library_bytes(device: torch.device, size: int) -> None:
    """Note that libraries keep `size` bytes of a CUDA device beyond those counted so far, from now on."""
    index = index_of(device)
    _further[index] = _further.get(index, 0) + size


@functools.cache
def _measured(index: int) -> int:
    with no_fake_mode():  # it is asked for while a graph is traced, too, where tensors are fake
        free_workspaces()
        before = torch.cuda.memory_allocated(index)
        _multiply(torch.device("cuda", index))
        taken = max(0, torch.cuda.memory_allocated(index) - before)
        free_workspaces()  # what multiplies takes them again; what does not goes without
        return taken


def _multiply(device: torch.device) -> None:
    """Have libraries take their buffers."""
    # Autograd multiplies in a thread of its own, which has a buffer of its own; not where torch, while it compiles,
    # has backward run in the caller's thread.
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(True):
        left = torch.zeros(16, 16, device=device, requires_grad=True)
        (left @ left).sum().backward()  # type: ignore[no-untyped-call]
    # A product with a bias added is cublasLt's, which may have a buffer beside that of cuBLAS.
    half = torch.zeros(64, 64, device=device, dtype=torch.float16)
    torch.addmm(half[0], half, half)


def allocated_after_gc(device: torch.device) -> int:
    """Bytes allocated on a CUDA device once garbage is gone, and buffers of libraries, which come again when needed.

    Measuring operators on streams of their own leaves buffers that no step uses.
    """
    collect()
    free_workspaces()
    return torch.cuda.memory_allocated(device)


def pooled_bytes(device: torch.device) -> int:
    """Bytes that a CUDA device's allocator keeps for CUDA graphs that were captured, beside what tensors have of them.

    Such a graph's kernels write there at each replay, though nothing is allocated: they are never given back.
    """
    pools = [item for item in _segments(device) if tuple(item["segment_pool_id"]) != _NO_POOL]
    return sum(item["total_size"] - item["allocated_size"] for item in pools)


def stuck_bytes(device: torch.device) -> int:
    """Bytes that a CUDA device's allocator caches and cannot hand back, as tensors lie in the same segments.

    Those of segments that expand are handed back page by page; those of CUDA graphs are `pooled_bytes`.
    """
    found = [item for item in _segments(device) if tuple(item["segment_pool_id"]) == _NO_POOL]
    whole = [item for item in found if item["allocated_size"] and not item["is_expandable"]]
    return sum(item["total_size"] - item["allocated_size"] for item in whole)


def _segments(device: torch.device) -> list[dict[str, Any]]:
    """What a CUDA device's allocator holds once it has handed back all that it can."""
    torch.cuda.empty_cache()
    snapshot: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    index = index_of(device)
    return [item for item in snapshot if item["device"] == index]


def slack_bytes(limit: int, device: torch.device) -> int:
    """Bytes of a limit that are left to the allocator: what it reserves and no tensor uses. 0 on CPU."""
    return _SEGMENTS + limit // _SHARE if device.type == "cuda" else 0


def with_slack(size: int, device: torch.device) -> int:
    """The least limit in bytes that leaves `size` bytes to tensors."""
    return (size + _SEGMENTS - 1) * _SHARE // (_SHARE - 1) + 1 if device.type == "cuda" else size


def use_expandable_segments(device: torch.device) -> None:
    """Let the allocator grow segments instead of leaving gaps between them, where the user has not chosen settings.

    Where all that was chosen is that they grow, they do so by smaller pages.
    """
    if device.type == "cuda" and torch.cuda.is_available() and _may_set():
        with without_lines("expandable_segments", "ALLOC_CONF"):
            _set_expandable(True)


def _may_set() -> bool:
    return _chosen().replace(" ", "").lower() in ("", "expandable_segments:true")


def _set_expandable(expand: bool) -> None:
    taken = allocator_settings(
        f"expandable_segments:{expand}", pages=f",large_segment_size_mb:{_LEAST_PAGE >> 20}" * expand
    )
    _growth[:] = [_Growth(expand, _LEAST_PAGE if taken else _PAGE)]


@dataclasses.dataclass(frozen=True)
class _Growth:
    """How segments grow: whether they do, and by how many bytes."""

    expands: bool
    page: int


_growth: list[_Growth] = []  # as was set here last; empty: never


def page_bytes() -> int:
    """By how many bytes a segment that expands grows: torch's limit looks at what is asked for, not at that."""
    return _growth[0].page if _growth and _may_set() else _PAGE


@contextlib.contextmanager
def own_segment() -> Iterator[None]:
    """A block of `OWN_SEGMENT` bytes or more that is allocated within has a segment of its own, of its size to 2 MiB.

    Segments that grow do so by `page_bytes`. Settings of the user's that say more than that they grow are left alone.
    """
    if not _may_set() or not (_chosen() or any(growth.expands for growth in _growth)):
        yield
        return
    _set_expandable(False)
    try:
        yield
    finally:
        _set_expandable(True)


def segments_expand() -> bool:
    """Whether segments grow where a budget is set, the user's settings allowing."""
    return not _chosen() or "expandable_segments:true" in _chosen().lower()


def _chosen() -> str:
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""


def retries_of(device: torch.device) -> int:
    """How often the allocator of a CUDA device has handed back what it caches, to take other memory."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
