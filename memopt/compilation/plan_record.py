"""A plan proved and put on record: at once, or when it is settled, as an engine tries several for its own code."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memopt.common.phases import phase
from memopt.report.build import build_report, put_on_record
from memopt.step.planned import Planned
from memopt.step.search_result import SearchResult

if TYPE_CHECKING:
    from memopt.compilation.session import Session


class PlanRecord:
    """How the plan that was made last comes into the session's report.

    Attributes:
        at_once: whether a plan is proved and put on record as soon as it is made; else `conclude` is called in the end.
    """

    def __init__(self) -> None:
        """At once, until that is put off."""
        self.at_once = True

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """Within: plans are neither proved nor put on record, but by `conclude`."""
        self.at_once = False
        try:
            yield
        finally:
            self.at_once = True

    def prepare(self, session: Session) -> None:
        """Do of `conclude` what can be done before there is code."""
        put_on_record(self._proved(session) or ())

    def conclude(self, session: Session) -> None:
        """Prove the plan of the step that was seen last, and put it on record, where that was left until now."""
        step, proved = session.step, self._proved(session)
        if step is not None and proved is not None:
            session.step = step = dataclasses.replace(step, planned=proved, search=None)
        if session.has_code():
            self.of_code(session)
        elif step is not None and step.planned:  # a warm start has no planned graphs: its stored report stands
            self.of_plan(session)

    def of_plan(self, session: Session, measured: int | None = None) -> None:
        """Put the plan on record; `measured` are the bytes above what is resident that a trial of it took."""
        assert session.step is not None
        plan = session.step.plan
        self._report(session, plan.peak_bytes, plan.minimum_bytes, measured)

    def of_code(self, session: Session) -> None:
        """Put on record what the engine's code takes: the minimum of a plan is no promise where there is code."""
        peak = session.code_peak()
        self._report(session, peak, peak)

    def _report(self, session: Session, peak: int, minimum: int, measured: int | None = None) -> None:
        step = session.step
        assert step is not None
        with phase("recording"):
            own = step.whole - step.base
            session.report = build_report(session, step.planned, peak, minimum, measured, own, step.plan.curve)

    def _proved(self, session: Session) -> tuple[Planned, ...] | None:
        """The step that was seen last with its plan proved, where that was left until now; asked again it is there."""
        step = session.step
        if step is None or step.search is None:
            return None
        with phase("rewriting"):
            found = step.search.prove(SearchResult(list(step.planned), step.plan, step.lowering))
        return tuple(found.planned)
