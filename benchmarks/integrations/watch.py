"""What an epoch really takes on the CPU: what lives when it begins, and the allocator's events from there."""

from __future__ import annotations

from types import TracebackType

import torch

from benchmarks.storages import bytes_of, storages
from memopt.memory.allocator_events import Recording

ALONE = 3  # optimizer steps before the allocator is looked at: in those memopt looks at it itself


class Watch:
    """The allocator in single steps of the first epoch of a run, then in the second as a whole.

    The last step of the first epoch and its evaluation have sizes that are new: memopt looks at those itself. The
    second epoch is looked at whole: its steps, its smaller batch, its evaluation, its checkpoint. The run is within
    `with`: what is looked at ends with it, also where it raises.
    """

    def __init__(self, steps: int, beside: frozenset[int] = frozenset()) -> None:
        """Nothing is looked at yet.

        Args:
            steps: optimizer steps of an epoch.
            beside: addresses of storages that are not of the run.
        """
        self.steps, self.beside = steps, beside
        self.peaks: list[int] = []  # bytes at once, of each piece that was looked at
        self._recording: Recording | None = None
        self._live = 0

    def step(self, number: int) -> None:
        """An optimizer step of the run begins, with the first batch that it has.

        Args:
            number: of the step, from 0.
        """
        if number > self.steps:  # within the second epoch
            return
        self.end()
        if number == self.steps or ALONE <= number < self.steps - 1:
            live = storages(self.beside)
            self._live, self._recording = bytes_of(live), Recording(torch.device("cpu"), live.values())
            self._recording.begin()

    def step_done(self, number: int) -> None:
        """The optimizer step is done, its gradients are let go of."""
        if number < self.steps:
            self.end()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """The run, or what is looked at of it, is at its end."""
        if self._recording is not None:
            self._recording.end()
            self.peaks.append(self._live + self._recording.peak)
            self._recording = None
