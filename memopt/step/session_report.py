"""The report of a model's steps, how long its making took, and notes for the user."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch

from memopt.budget import Budget, format_bytes
from memopt.common.phases import Clock, phase
from memopt.memory.resident import Resident
from memopt.report.record import ExecutableReport, Report
from memopt.step.budget_state import BudgetState
from memopt.step.guard import short_of_memory
from memopt.step.planned import Planned


class SessionReport(BudgetState):
    """How the steps stand to their budget, with what is on record of it.

    Attributes:
        report: of what was planned last; None before.
        notes: lines for the user, each once.
        clock: of planning and compiling.
        executables: what the engine's own compiler made.
        unplanned: whether there is a report, and nothing was planned: all calls so far have run eagerly.
    """

    def __init__(self, budget: Budget | None, resident: Resident) -> None:
        """Nothing is on record yet."""
        super().__init__(budget, resident)
        self.report: Report | None = None
        self.notes: list[str] = []
        self.clock = Clock()
        self._optimizer_notes: list[str] = []
        self._host_note = ""  # of what waits on the host, in the notes
        self.unplanned = False
        self.executables: tuple[ExecutableReport, ...] = ()

    def reports(self, report: Report | None) -> None:
        """Put a report on record, in place of the one before."""
        self.report = report

    def runs_on(self, backend: str) -> None:
        """Put on record which engine runs, with the notes so far."""
        if self.report is not None:
            self.report = dataclasses.replace(self.report, backend=backend, notes=tuple(self.notes))

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Put on record how long the block takes, and what of it goes into which phase of planning and compiling."""
        try:
            with self.clock.running(), phase(what):
                yield
        finally:
            if self.report is not None:
                self.report = dataclasses.replace(self.report, seconds=dict(self.clock.seconds))

    def compiled(self, executables: Sequence[ExecutableReport]) -> None:
        """Put on record what an engine's own compiler says of the executables that it made of a graph."""
        self.executables = (*self.executables, *executables)
        if self.report is not None:
            self.report = dataclasses.replace(self.report, executables=self.executables)

    def note_failures(self, planned: Sequence[Planned]) -> None:
        """Tell the user of the graphs whose trial failed."""
        for item in planned:
            if item.failure:
                self.note(f"no trial step was measured: {item.failure}")

    def took(self, size: int) -> None:
        """Put the measured peak of the last step on record: bytes on the device, all that is resident included."""
        if self.report is not None:
            measured = max(size, self.optimizer_peak())
            self.report = dataclasses.replace(self.report, measured_peak_bytes=measured)

    def expects(self, size: int) -> None:
        """Put on record what the step is predicted to take where that is more than its tensors: bytes, as `took`."""
        if self.report is not None and size > self.report.peak_bytes:
            self.report = dataclasses.replace(self.report, peak_bytes=size)

    def note(self, text: str) -> None:
        """Tell the user something, once."""
        if text not in self.notes:
            self.notes.append(text)
            if self.report is not None:
                self.report = dataclasses.replace(self.report, notes=tuple(self.notes))

    def unsay(self, *beginnings: str) -> None:
        """Take the notes back that begin so: they hold no longer."""
        if any(text.startswith(beginnings) for text in self.notes):
            self.notes[:] = [text for text in self.notes if not text.startswith(beginnings)]
            if self.report is not None:
                self.report = dataclasses.replace(self.report, notes=tuple(self.notes))

    def note_optimizers(self, texts: Sequence[str]) -> None:
        """Tell the user what is to be known of the optimizers, in place of what was said of them before."""
        if list(texts) != self._optimizer_notes:
            self.notes[:] = [text for text in self.notes if text not in self._optimizer_notes]
            self._optimizer_notes = list(texts)
            self.notes += [text for text in texts if text not in self.notes]
            if self.report is not None:
                self.report = dataclasses.replace(self.report, notes=tuple(self.notes))

    def waits_on_host(self, sizes: Sequence[int]) -> None:
        """Tell the user how many values of the step wait on the host, by their bytes, in place of what was said before.

        Nothing is said where there are none.
        """
        if self._host_note:
            self.unsay(self._host_note)
        self._host_note = ""
        if sizes:
            what = "1 value waits" if len(sizes) == 1 else f"{len(sizes)} values wait"
            self._host_note = (
                f"{what}, {format_bytes(sum(sizes))}, in the host's pinned memory between forward and backward"
            )
            self.note(self._host_note)

    def short_of_memory(self, error: torch.OutOfMemoryError) -> str:
        """What the user reads when memory runs out in a step."""
        return short_of_memory(self.report, error)
