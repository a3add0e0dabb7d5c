"""Pinned buffers of the host that values of a device wait in, and the stream that copies run on.

One stream per device runs all copies, beside what computes, in the order in which they are asked for. So a buffer is
written to again only after what was in it was read, with no event to wait for, and the bytes that are pinned are those
that ever waited at the same time. Whether a buffer is free is asked of its storage: as long as autograd holds what
waits there, it is not.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch

from memopt.torch_compat.cuda_memory import free_host_cache
from memopt.torch_compat.storages import storage_users

# A buffer serves values of no less than this share of its bytes.
_FITS = 0.8


class Buffer:
    """One pinned piece of the host's memory.

    Attributes:
        storage: the memory.
        event: recorded behind the last copy to or from it.
        captured: whether that was while a CUDA graph was captured, of which the event is a part: outside of the capture
            nothing can be asked of it, and what the graph copies is ordered by where it is replayed.
        moving: what is being copied to it or from it, until something waits for that. A step that fails before must not
            give the memory to another tensor, or back to the device, meanwhile.
    """

    def __init__(self, size: int, event: Any) -> None:
        """Take so many bytes, pinned where the system lets them be."""
        self.storage, self.event, self.captured = _pinned(size).untyped_storage(), event, False
        self.moving: torch.Tensor | None = None

    @property
    def free(self) -> bool:
        """Whether no tensor lies in it."""
        return storage_users(self.storage) == 1


class Buffers:
    """The buffers of one device."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is pinned yet."""
        self.device, self.stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._by_address: dict[int, Buffer] = {}
        self._lock = threading.Lock()

    def send(self, value: torch.Tensor) -> torch.Tensor:
        """Begin to copy a value of the device; return the host's tensor that it will be in, of the same layout."""
        size = span_bytes(value)
        current = torch.cuda.current_stream(self.device)
        with self._lock:
            buffer = self._take(size)
            held = torch.empty(0, dtype=value.dtype).set_(buffer.storage, 0, value.size(), value.stride())
            self._let_go(buffer, current)
            self._copy(buffer, held, value, current)
            buffer.moving = value
        return held

    def fetch(self, held: torch.Tensor) -> torch.Tensor:
        """Begin to copy what waits on the host; return the device's tensor that it will be in."""
        value = torch.empty_strided(held.size(), held.stride(), dtype=held.dtype, device=self.device)
        current = torch.cuda.current_stream(self.device)
        with self._lock:
            buffer = self._of(held)
            if buffer is None:  # hooks of autograd's gave another tensor for it
                flat(value).copy_(flat(held))
                return value
            self._let_go(buffer, current)
            self._copy(buffer, value, held, current)
            buffer.moving = value
        return value

    def wait(self, held: torch.Tensor) -> None:
        """Have the current stream wait for the last copy to or from where a tensor of the host's lies."""
        with self._lock:
            buffer = self._of(held)
            if buffer is not None:
                self._wait(buffer, torch.cuda.current_stream(self.device))

    def settle(self, held: torch.Tensor) -> None:
        """Wait until what was sent is there: for those that read it on the host."""
        buffer = self._of(held)
        if buffer is not None:
            self._synchronize(buffer)

    def release(self) -> None:
        """Give back the buffers in which nothing waits, and what a step that failed left on its way."""
        if _captures(self.device):  # by garbage that is found then: nothing can be waited for
            return
        if not self._lock.acquire(blocking=False):  # garbage is collected within a copy: the next one may reuse them
            return
        try:
            current = torch.cuda.current_stream(self.device)
            for address, buffer in list(self._by_address.items()):
                self._let_go(buffer, current)
                if buffer.free:
                    self._synchronize(buffer)
                    del self._by_address[address]
        finally:
            self._lock.release()

    @property
    def pinned_bytes(self) -> int:
        """The bytes of all buffers."""
        return sum(buffer.storage.nbytes() for buffer in self._by_address.values())

    def _take(self, size: int) -> Buffer:
        """The smallest free buffer that serves so many bytes; else a new one."""
        fitting = (b for b in self._by_address.values() if size <= b.storage.nbytes() <= size / _FITS and b.free)
        found = min(fitting, key=lambda buffer: buffer.storage.nbytes(), default=None)
        if found is None:
            found = Buffer(size, torch.cuda.Event())  # type: ignore[no-untyped-call]
            self._by_address[found.storage.data_ptr()] = found
        return found

    def _of(self, held: torch.Tensor) -> Buffer | None:
        return self._by_address.get(held.untyped_storage().data_ptr())

    def _let_go(self, buffer: Buffer, current: Any) -> None:
        if buffer.moving is not None:
            self._wait(buffer, current)

    def _wait(self, buffer: Buffer, current: Any) -> None:
        if not buffer.captured or _captures(self.device):
            current.wait_event(buffer.event)
        buffer.moving = None

    def _synchronize(self, buffer: Buffer) -> None:
        if buffer.captured:
            torch.cuda.synchronize(self.device)
        else:
            buffer.event.synchronize()

    def _copy(self, buffer: Buffer, into: torch.Tensor, of: torch.Tensor, current: Any) -> None:
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            flat(into).copy_(flat(of), non_blocking=True)
            buffer.captured = _captures(self.device)
        buffer.event.record(self.stream)


def span_bytes(value: torch.Tensor) -> int:
    """Bytes from the first to the last element of a layout."""
    return flat(value).numel() * value.element_size()


def flat(value: torch.Tensor) -> torch.Tensor:
    """All memory from the first to the last element of a tensor, in one row: whatever its layout, one piece to copy."""
    if value.numel() == 0:
        return value.as_strided((0,), (1,))
    elements = 1 + sum((size - 1) * stride for size, stride in zip(value.size(), value.stride(), strict=True))
    return value.as_strided((elements,), (1,))


# -- all devices ----------------------------------------------------------------------------------------------------

_BUFFERS: dict[torch.device, Buffers] = {}
_CREATING = threading.Lock()
_OWNERS: set[int] = set()  # compiled steps whose values wait
_numbers = itertools.count()


def buffers_of(device: torch.device) -> Buffers:
    """The buffers of a CUDA device."""
    with _CREATING:
        if device not in _BUFFERS:
            _BUFFERS[device] = Buffers(device)
        return _BUFFERS[device]


def keep_for(owner: Any) -> None:
    """Keep what is pinned from one step to the next as long as this one of the compiled steps is there."""
    number = next(_numbers)
    _OWNERS.add(number)
    weakref.finalize(owner, _forget, number).atexit = False


def release() -> None:
    """Give back, on all devices, the buffers in which nothing waits."""
    for buffers in list(_BUFFERS.values()):
        buffers.release()
    if _BUFFERS:
        free_host_cache()


def _forget(number: int) -> None:
    _OWNERS.discard(number)
    if not _OWNERS:
        release()


def _captures(device: torch.device) -> bool:
    """Whether a CUDA graph is captured of what the current stream is asked for."""
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def _pinned(size: int) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # the system pins no more: copies take longer then, and are waited for
        return torch.empty(size, dtype=torch.uint8)
