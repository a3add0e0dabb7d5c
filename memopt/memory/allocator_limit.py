"""The budget as a limit of CUDA's own allocator: in a step it frees what it caches before it takes more of the device.

A step whose tensors fit may still reserve more, since blocks that are free lie where a new tensor does not fit, and the
allocator would rather grow than hand them back. At its limit it hands back every free block (with expandable segments,
every free page) and tries again. That takes time, so steps are planned such that it is rare; but what is reserved stays
within the budget whatever else ran before. Outside of steps the allocator does as it likes.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch

from memopt.memory.allocator import index_of, page_bytes, segments_expand
from memopt.torch_compat.cuda_memory import free_workspaces

_PAGE = 2**21  # what the device gives out at a time
_LITTLE = 2**27  # free bytes in segments that hold something: those of small tensors, and the ends of others

_lock = threading.RLock()
_tokens = itertools.count(1)


@dataclasses.dataclass
class _Device:
    """One device's limits, in bytes, and the share of it that the process was allowed before the first."""

    before: float
    limits: dict[int, int] = dataclasses.field(default_factory=dict)


_devices: dict[int, _Device] = {}
_lifted: collections.Counter[int] = collections.Counter()  # how often each device's limits are lifted now


class Held(NamedTuple):
    """What a device's allocator holds at a moment, in bytes: of tensors, and in all.

    Beside it how often it has handed its cache back by itself, where it was at its limit.
    """

    allocated_bytes: int
    reserved_bytes: int
    retries: int = 0

    def handed_back_since(self, before: Held | None) -> bool:
        """Whether someone else had it hand back its cache after an earlier moment: more than a page of it."""
        if before is None or self.retries != before.retries:
            return False
        return self.reserved_bytes < before.reserved_bytes - _PAGE


def held_now(device: torch.device) -> Held:
    """Ask the allocator of a CUDA device once; torch's own functions sort all of its statistics first."""
    counts = torch.cuda.memory_stats_as_nested_dict(device)
    allocated, reserved = (int(counts[name]["all"]["current"]) for name in ("allocated_bytes", "reserved_bytes"))
    return Held(allocated, reserved, int(counts.get("num_alloc_retries", 0)))


@dataclasses.dataclass(frozen=True)
class Allowance:
    """What the allocator may hold during a model's steps: its budget, and beside it what belongs to others.

    A budget of all that the process holds is not exceeded for others while what it leaves to the allocator is more.

    Attributes:
        device: a CUDA device.
        limit_bytes: the budget.
        allocated_bytes: what was allocated when the step was planned.
        own_bytes: what of that the budget counts.
        coming_bytes: what the budget counts and comes to stay later: the optimizer's state, libraries' buffers.
        pooled_bytes: what others' CUDA graphs keep beside tensors (see `memopt.memory.allocator.pooled_bytes`).
        spare_bytes: what others may have of a budget of all that the process holds.
        page_bytes: what a segment that grows page by page may take beyond a limit, which only what is asked for is
            compared with.
    """

    device: torch.device
    limit_bytes: int
    allocated_bytes: int
    own_bytes: int
    coming_bytes: int = 0
    pooled_bytes: int = 0
    spare_bytes: int = 0
    page_bytes: int = 0

    @property
    def beyond_bytes(self) -> int:
        """Bytes by which what belongs to others exceeds the limit: more of it than is spare."""
        return max(0, self._others - self.spare_bytes)

    @property
    def _others(self) -> int:
        return max(0, self.allocated_bytes - self.own_bytes) + self.pooled_bytes

    def limit(self, held: Held) -> int:
        """The bytes that the allocator may hold in a step that begins where it holds so much."""
        missing = max(0, self.own_bytes - self.allocated_bytes)  # counted, but not there yet: libraries' buffers, say
        grown = held.allocated_bytes - self.allocated_bytes - self.coming_bytes - missing
        beyond = max(0, self._others + max(0, grown) - self.spare_bytes)
        return self.limit_bytes + beyond - self.page_bytes

    def expected(self, held: Held, beyond: int) -> int:
        """The bytes that it will hold, where a step takes `beyond` bytes more than what is there when it begins."""
        return max(held.allocated_bytes, self.allocated_bytes + self.coming_bytes) + beyond


def enter(device: torch.device, limit_bytes: int) -> tuple[int, int]:
    """Hold the allocator of a CUDA device to a limit until `leave`; of several limits the largest is in force.

    Returns:
        What `leave` takes.
    """
    index = index_of(device)
    with _lock:
        if index not in _devices:
            _devices[index] = _Device(torch.cuda.get_per_process_memory_fraction(index))
        token = index, next(_tokens)
        _devices[index].limits[token[1]] = limit_bytes
        _apply(index)
    return token


def leave(token: tuple[int, int]) -> None:
    """Take a limit back; what the process was allowed before the first is allowed again after the last."""
    index, number = token
    with _lock:
        held = _devices.get(index)
        if held is None or held.limits.pop(number, None) is None:
            return
        if not held.limits:
            del _devices[index]
        _apply(index, held.before)


@contextlib.contextmanager
def lifted(device: torch.device) -> Iterator[None]:
    """Let the allocator take what the process was allowed before, to see what it would take.

    Blocks may be nested: until the outermost is left, limits that are entered within are not in force either.
    """
    index = _index(device)
    if index is None:
        yield
        return
    _lift(index, 1)
    try:
        yield
    finally:
        _lift(index, -1)


def _lift(index: int, more: int) -> None:
    with _lock:
        _lifted[index] += more
        if index in _devices:
            _apply(index)


def grow(
    device: torch.device, size: int, held: Held | None = None, *, anew: bool = False, in_pieces: bool = False
) -> bool:
    """Have the allocator of a CUDA device take `size` bytes in all at once, where it caches next to nothing.

    Torch compares a request as a whole with what the limit leaves, even where memory is free at the end of the segment
    that would grow: taken piece by piece, a step near its limit would have the cache handed back again and again.
    Only where segments expand, which are handed back page by page: another one that is so large could not be.

    Args:
        device: which.
        size: bytes in all.
        held: what it holds now; by default it is asked.
        anew: whether libraries give up their buffers first, which come again when they are needed. Where the cache was
            handed back around them, they lie in the way of one large piece.
        in_pieces: whether what is cached lies around where tensors were when the cache was handed back: then it is
            handed back first, however much it is.

    Returns:
        Whether it has taken more.
    """
    held = held_now(device) if held is None else held
    missing = _whole_pages(size - held.reserved_bytes)
    cached = held.reserved_bytes - held.allocated_bytes
    if missing <= 0 or not segments_expand() or (cached > _LITTLE and not in_pieces):
        return False
    if anew:
        free_workspaces()
    if anew or in_pieces:
        torch.cuda.empty_cache()
        missing = _whole_pages(size - held_now(device).reserved_bytes)
    try:
        torch.empty(missing, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:  # the step itself will tell
        return False
    return True


def _whole_pages(size: int) -> int:
    """Less than a page more would take all of it, beyond a limit maybe."""
    return size // page_bytes() * page_bytes()


def held_bytes(device: torch.device) -> int | None:
    """The limit in force on a device; None where there is none."""
    index = _index(device)
    with _lock:
        held = None if index is None else _devices.get(index)
        return None if held is None else max(held.limits.values())


def limit_available_bytes() -> int | None:
    """What the current CUDA device's limit leaves beside what is reserved, in bytes; None where there is none."""
    if not _devices:
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    limit = held_bytes(device)
    return None if limit is None else max(0, limit - held_now(device).reserved_bytes)


def limit_leaves(size: int | None) -> bool:
    """Whether the limit of the current CUDA device, if one is in force, leaves so many bytes; None: not known.

    What the allocator caches is handed back for that.
    """
    available = limit_available_bytes()
    if available is None or (size is not None and size <= available):
        return True
    if size is None:
        return False
    torch.cuda.empty_cache()
    return size <= (limit_available_bytes() or 0)


def _apply(index: int, before: float = 1.0) -> None:
    held = _devices.get(index)
    share = before
    if held is not None and _lifted[index]:
        share = held.before
    elif held is not None:
        total = torch.cuda.get_device_properties(index).total_memory
        share = min(held.before, max(held.limits.values()) / total)
    torch.cuda.set_per_process_memory_fraction(share, index)


def _index(device: torch.device) -> int | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return index_of(device)
