"""What the allocator holds beyond a moment, in code that is not ours: until backward, or somebody else measures."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import torch

from memopt.memory.distributed import has_group
from memopt.memory.measure import Recording, is_profiled
from memopt.torch_compat.profilers import mark


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes beyond what was allocated when a window was opened.

    Attributes:
        peak: the most at once.
        live: when it was closed.
    """

    peak: int = 0
    live: int = 0


class Window:
    """Looks at the allocator of one device from now until backward begins.

    On CPU by its events in this thread, which are read once backward is over; where processes work together nothing is
    seen there, as their collectives end in threads of their own. On CUDA by its own counts, which are the user's to
    reset and are let stand: of a peak that is no new one it is known that it was no higher than before.
    """

    def __init__(self, device: torch.device, known: Mapping[int, int]) -> None:
        """Open it.

        Args:
            device: CPU or a CUDA device.
            known: on CPU, bytes of memory that is there already, by address: its releases are seen where they can be.
        """
        self._device = device
        self._recording: Recording | None = None
        self._held: Held | None = None
        self.backward = False  # whether backward has begun
        self.within = False  # whether a region of the profiler's that began meanwhile was open when it was closed
        if device.type == "cuda":
            self._before = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        elif not has_group() and not is_profiled():
            self._recording = Recording(device, known, yields=True)
            self._recording.begin()

    def backward_begins(self) -> None:
        """What comes now is not looked at."""
        self.backward = True
        if self._device.type == "cuda":
            self.close()
        elif self._recording is not None and not self._recording.ended:
            mark(_MARK)

    def close(self) -> Held | None:
        """What was held until backward began, or by now; None where that cannot be said. It may be asked again."""
        if self._held is None and self._device.type == "cuda":
            allocated, most = self._before
            live, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
            self._held = Held(max(peak - allocated if peak > most else 0, live - allocated, 0), live - allocated)
        elif self._held is None and self._recording is not None:
            self._recording.end()
            if self._recording.ended:
                self.within = self._recording.within
                self._held, self._recording = _of(self._recording), None
        return self._held


_MARK = "backward begins"


def _of(recording: Recording) -> Held:
    until = recording.marks[_MARK][0] if _MARK in recording.marks else None
    sums = list(itertools.accumulate(size for when, size in recording.changes if until is None or when < until))
    return Held(max((0, *sums)), sums[-1] if sums else 0)
