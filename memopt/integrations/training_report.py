"""The report of a training run: of its largest step, not of the evaluation or smaller batch that came last."""

from __future__ import annotations

import dataclasses

from memopt.module import CompiledModule, calls_of
from memopt.report.record import Report


class TrainingReport:
    """Keeps the report of the largest training step that was planned so far."""

    def __init__(self) -> None:
        """Nothing was planned yet."""
        self._largest: Report | None = None

    def see(self, stand_in: CompiledModule) -> None:
        """Look at what was planned for the training step that has just run; its last call may be one of inference."""
        for session in calls_of(stand_in).sessions.values():
            told = session.report
            if told is None or not any(program.kind == "training" for program in told.programs):
                continue
            known = self._largest
            # A step's peak is its plan's: one that was planned anew for less is as large as before. What was planned
            # for another budget, as a fraction is of eager's peak once its loop is seen, is no longer in force.
            if (
                known is None
                or told.budget_bytes != known.budget_bytes
                or told.unconstrained_bytes >= known.unconstrained_bytes
            ):
                known = told
            notes = tuple(dict.fromkeys((*known.notes, *told.notes)))
            self._largest = dataclasses.replace(known, notes=notes)

    def of(self, stand_in: CompiledModule) -> Report:
        """The report of the largest step; of the latest compilation where no step was planned.

        Raises:
            RuntimeError: nothing was compiled yet.
        """
        latest = stand_in.report  # ends what is being looked at
        self.see(stand_in)
        return self._largest or latest
