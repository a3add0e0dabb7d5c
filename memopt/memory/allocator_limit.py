"""The budget as a limit of CUDA's own allocator: it frees what it caches before it takes more of the device.

A step whose tensors fit may still reserve more, since blocks that are free lie where a new tensor does not fit, and the
allocator would rather grow than hand them back. At its limit it hands back every free block (with expandable segments,
every free page) and tries again, so that what is reserved stays within the budget as long as the tensors are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

_lock = threading.RLock()
_devices: dict[int, _Device] = {}


@dataclasses.dataclass
class _Device:
    """One device's claims: bytes by owner and by what the budget is for; and the share allowed before the first."""

    before: float
    claims: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    foreign: int = 0

    def claimed(self, without: int | None = None) -> int:
        """Bytes that all owners claim together; `without` leaves one model out."""
        largest: dict[int, int] = {}
        for model, size in self.claims.values():
            largest[model] = max(size, largest.get(model, 0))
        return sum(size for model, size in largest.items() if model != without)


def hold(owner: Any, model: Any, limit_bytes: int, own_bytes: int, device: torch.device) -> None:
    """Let the allocator of a CUDA device hold no more than the owner's budget, for as long as the owner lives.

    Owners of one model share the largest of their budgets; those of several models share the sum. What is allocated now
    and belongs to none of them is allowed on top. The limit never goes below what is reserved once the cache is
    emptied, nor above what the process was allowed before. Nothing happens on other devices.

    Args:
        owner: whose budget it is; a later claim of the same owner replaces a smaller one.
        model: what the budget is for.
        limit_bytes: the budget.
        own_bytes: bytes of the budget that are allocated already.
        device: where.
    """
    index = _index(device)
    if index is None:
        return
    with _lock:
        if index not in _devices:
            _devices[index] = _Device(torch.cuda.get_per_process_memory_fraction(index))
        held = _devices[index]
        if id(owner) not in held.claims:
            weakref.finalize(owner, _release, index, id(owner)).atexit = False
        known = held.claims.get(id(owner), (0, 0))[1]
        held.claims[id(owner)] = id(model), max(known, limit_bytes)
        torch.cuda.empty_cache()
        held.foreign = max(0, torch.cuda.memory_allocated(index) - own_bytes - held.claimed(without=id(model)))
        _apply(index, held)


@contextlib.contextmanager
def lifted(device: torch.device) -> Iterator[None]:
    """Let the allocator take what the process was allowed before there were budgets, to see what it would take."""
    index = _index(device)
    with _lock:
        held = None if index is None else _devices.get(index)
        if held is not None:
            torch.cuda.set_per_process_memory_fraction(held.before, index)
    try:
        yield
    finally:
        with _lock:
            held = None if index is None else _devices.get(index)
            if index is not None and held is not None:
                torch.cuda.empty_cache()
                _apply(index, held)


def held_bytes(device: torch.device) -> int | None:
    """The most bytes that the allocator of a device may hold for the sake of budgets; None where there are none."""
    index = _index(device)
    with _lock:
        held = None if index is None else _devices.get(index)
        return None if held is None else held.claimed() + held.foreign


def _release(index: int, owner: int) -> None:
    with _lock:
        held = _devices[index]
        del held.claims[owner]
        if held.claims:
            _apply(index, held)
        else:
            del _devices[index]
            torch.cuda.set_per_process_memory_fraction(held.before, index)


def _apply(index: int, held: _Device) -> None:
    total = torch.cuda.get_device_properties(index).total_memory
    limit = max(held.claimed() + held.foreign, torch.cuda.memory_reserved(index))
    torch.cuda.set_per_process_memory_fraction(min(held.before, limit / total), index)


def _index(device: torch.device) -> int | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return device.index if device.index is not None else torch.cuda.current_device()
