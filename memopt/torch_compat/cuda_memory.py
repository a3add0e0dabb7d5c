"""CUDA's caching allocator where torch has no public call: libraries' workspaces, settings, pools, its history.

Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

_WITHOUT_MEMORY: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def free_workspaces() -> None:
    """Give back what cuBLAS keeps between calls, to the allocator's cache; what multiplies next asks for it again."""
    torch._C._cuda_clearCublasWorkspaces()


def allocator_settings(plain: str, *, pages: str = "") -> bool:
    """Set the allocator's settings, `expandable_segments:True` say, and with them what only newer versions know.

    Args:
        plain: what every version knows.
        pages: is added to it, where the version takes it.

    Returns:
        Whether it takes `pages`.
    """
    # The older function warns on versions that have the newer one.
    settings: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    settings = settings or torch.cuda.memory._set_allocator_settings
    try:
        settings(plain + pages)
        return True
    except (ValueError, RuntimeError):  # of a version that has pages of one size
        settings(plain)
        return False


def keeps_history() -> bool:
    """Whether the allocator notes its requests already, as somebody has asked it to."""
    return bool(getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)())


@contextlib.contextmanager
def history(most: int) -> Iterator[Callable[[int], list[dict[str, Any]]]]:
    """Within: the allocator notes its requests; yields what gives those so far, the latest `most`, by device index."""
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=most)
    try:
        yield lambda index: torch.cuda.memory._snapshot()["device_traces"][index]
    finally:
        torch.cuda.memory._record_memory_history(None)


def leave_pool(device: int, pool: tuple[int, int]) -> None:
    """End a capture's use of its pool, where the capture has failed; RuntimeError where torch did so itself."""
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)  # the capture counts as a user of it


def storage_of_memory(address: int, device: torch.device, nbytes: int) -> torch.UntypedStorage:
    """A storage on memory that it does not hold: who gives its bytes must keep them."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    _WITHOUT_MEMORY.add(storage)
    return storage  # type: ignore[no-any-return]


def holds_its_memory(storage: torch.UntypedStorage) -> bool:
    """Whether the end of a storage is the end of its memory: not of one that `storage_of_memory` has made."""
    return storage not in _WITHOUT_MEMORY


def free_host_cache() -> None:
    """Give pinned buffers of the host's memory back that nothing lies in, where the version can."""
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()
