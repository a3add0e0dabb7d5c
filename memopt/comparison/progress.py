"""One model's comparison while its processes run: which rows there are, and which errors can be found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memopt.comparison.job import Job
from memopt.comparison.record import Row
from memopt.comparison.steps import Engine
from memopt.comparison.truth import Values, errors

_EVAL_NOTE = "the training step draws random numbers: errors are those of a step in eval mode, with gradients"


@dataclasses.dataclass(frozen=True)
class Case:
    """One model to be compared.

    Attributes:
        title: its name in the comparison.
        job: how it is made and run; the engine and the files are filled in.
        engines: its rows.
        settings: what else was asked for, to be put on record.
    """

    title: str
    job: Job
    engines: tuple[Engine, ...]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Progress:
    """What is known of a case so far.

    The truth is a job whose engine has no name. Where it draws random numbers, every engine that ran gets a job more,
    of a step in eval mode, whose values are the ones that are compared.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        folder.mkdir()
        self.case, self._folder = case, folder
        self.notes: tuple[str, ...] = ()
        self._rows: dict[str, Row] = {}
        self._truth: dict[str, Any] | None = None

    @property
    def rows(self) -> tuple[Row, ...]:
        """Those that have ended, in the order asked for."""
        return tuple(self._rows[engine.name] for engine in self.case.engines if engine.name in self._rows)

    def jobs(self) -> list[Job]:
        """The truth, and every row."""
        return [self._job(name, False) for name in ("", *(engine.name for engine in self.case.engines))]

    def take(self, job: Job, said: Mapping[str, Any]) -> Sequence[Job]:
        """Note what the process of a job said in the end. Returns the jobs that are to be done next."""
        if not job.engine:
            self._truth = dict(said)
            if "reason" in said:
                self.notes = (f"errors are not known: no float64 reference ({said['reason']})",)
            elif said["random"]:
                self.notes = (_EVAL_NOTE,)
            return [new for row in self.rows for new in self._compared(row)]
        if not job.eval_gradients:
            self._rows[job.engine] = _row(job.engine, said)
            return self._compared(self._rows[job.engine])
        if "reason" in said:
            self._without_error(job.engine, said["reason"])
        else:
            self._find_errors(job)
        return []

    def _compared(self, row: Row) -> Sequence[Job]:
        """Find a row's errors, if they can be; else the job that lets them be found."""
        if row.reason or self._truth is None or "reason" in self._truth:
            return []
        if self._truth["random"]:
            return [self._job(row.name, True)]
        self._find_errors(self._job(row.name, False))
        return []

    def _find_errors(self, job: Job) -> None:
        path = Path(job.values)
        try:
            error, gradient_error = errors(Values.load(job.values), Values.load(self._job("", False).values))
        except ValueError as reason:
            self._without_error(job.engine, str(reason))
        else:
            row = self._rows[job.engine]
            self._rows[job.engine] = dataclasses.replace(row, error=error, gradient_error=gradient_error)
        path.unlink()

    def _without_error(self, name: str, reason: str) -> None:
        row = self._rows[name]
        self._rows[name] = dataclasses.replace(row, notes=(*row.notes, f"its error is not known: {reason}"))

    def _job(self, name: str, eval_gradients: bool) -> Job:
        number = [""] + [engine.name for engine in self.case.engines]
        file = f"{number.index(name)}{'-eval' if eval_gradients else ''}.pt"
        values = str(self._folder / file)
        return dataclasses.replace(self.case.job, engine=name, values=values, eval_gradients=eval_gradients)


def _row(name: str, said: Mapping[str, Any]) -> Row:
    fields = {field.name for field in dataclasses.fields(Row)}
    content: dict[str, Any] = {"name": name}
    content |= {key: tuple(value) if isinstance(value, list) else value for key, value in said.items() if key in fields}
    return Row(**content)
