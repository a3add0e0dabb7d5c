"""How many bytes a device holds: by the allocator's own counts on CUDA, by the tracker's elsewhere."""

from __future__ import annotations

import contextlib
from typing import NamedTuple, Protocol

import torch

from memopt.memory.allocator_limit import held_now
from memopt.monitoring.tracker import Tracker


class Most(NamedTuple):
    """The most bytes since the step began: of tensors, and CUDA only, that the allocator held."""

    peak: int
    reserved: int | None = None


class Meter(Protocol):
    """Bytes of tensors on a device."""

    def held(self) -> int:
        """Bytes that are there now."""

    def most(self) -> Most:
        """The most since `begin`."""

    def begin(self) -> None:
        """A step begins."""

    def close(self) -> None:
        """No step begins any more."""


class TrackerMeter:
    """By what the tracker knows."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def held(self) -> int:
        """Bytes that are there now."""
        return self._tracker.live

    def most(self) -> Most:
        """The most since `begin`."""
        return Most(self._tracker.peak)

    def begin(self) -> None:
        """A step begins: the tracker has been told."""

    def close(self) -> None:
        """No step begins any more."""


_open: list[CudaMeter] = []  # those whose peaks a reset of CUDA's counts would take away


class CudaMeter:
    """By the allocator's counts, whose peaks are reset as a step begins; other meters note them before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._most = (0, 0)
        _open.append(self)
        self.begin()

    def held(self) -> int:
        """Bytes that are there now."""
        return held_now(self._device).allocated_bytes

    def most(self) -> Most:
        """The most since `begin`."""
        self._note()
        return Most(*self._most)

    def begin(self) -> None:
        """A step begins."""
        for meter in _open:
            if meter._device == self._device:
                meter._note()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._most = (0, 0)

    def close(self) -> None:
        """No step begins any more."""
        with contextlib.suppress(ValueError):
            _open.remove(self)

    def _note(self) -> None:
        counts = torch.cuda.memory_stats_as_nested_dict(self._device)
        now = (int(counts[name]["all"]["peak"]) for name in ("allocated_bytes", "reserved_bytes"))
        allocated, reserved = (max(pair) for pair in zip(self._most, now, strict=True))
        self._most = allocated, reserved
