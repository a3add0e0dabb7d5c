"""Planning calls without running the model: before the first of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from memopt.budget import BudgetError
from memopt.calls.eager_within import EagerWithinLimit, why_not
from memopt.calls.failures import failure_of
from memopt.calls.fallback import Fallback
from memopt.calls.guard_fast_path import Kind
from memopt.calls.own_errors import unsure_of
from memopt.calls.planned import programs_of
from memopt.calls.residents import Residents
from memopt.calls.sessions import Sessions
from memopt.capture.export import CaptureError, NotCapturedError
from memopt.common.garbage import collecting_rarely
from memopt.common.one_piece import in_one_piece
from memopt.common.progress import planning
from memopt.compilation.session import Session
from memopt.options import Options
from memopt.program import Program
from memopt.report.record import Report
from memopt.step.inference import plan_inference
from memopt.torch_compat.dispatch import no_autocast

log = logging.getLogger("memopt")


class PlanningFailed(CaptureError):
    """Planning failed inside memopt."""


class PlanAhead:
    """Plans calls of one model without running it."""

    def __init__(
        self, model: nn.Module, options: Options, sessions: Sessions, residents: Residents, fallback: Fallback
    ) -> None:
        """Of a model with these compilations; nothing is planned yet."""
        self._model, self._options = model, options
        self._sessions, self._residents, self._fallback = sessions, residents, fallback

    def plan(self, kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Report:
        """Plan for a call of this kind with these inputs without running the model.

        Raises:
            BudgetError: no plan keeps the budget.
            NotCapturedError: the model's control flow depends on values of tensors, or no graph can be captured.
            PlanningFailed: memopt failed.
        """
        if failed := self._fallback.why_failed(self._fallback.kind(args, kwargs, kind)):
            raise PlanningFailed(failed)
        return self._planned(kind, args, kwargs)

    @in_one_piece
    def _planned(self, kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Report:
        """The plan of such a call, which did not fail before; as `plan`."""
        session = self._sessions.of(kind)
        self._residents.count_optimizers()
        session.counts_resident(self._residents.of(args, kwargs, kind))
        self._sessions.last = session
        failure = None
        try:
            self._plan(session, args, kwargs)
        except Exception as error:
            failure = failure_of(error, self._options)
            if failure is None:
                raise
        if failure is not None:
            own = self._fallback.own_errors.on_fakes(args, kwargs)
            if own is None and failure.traced and self._options.budget is not None:
                raise failure.not_captured(session.model_name)
            self._sessions.drop(kind.plan)
            said = failure.said if own is None else unsure_of(own)
            name, report = session.model_name, failure.save(session.model_name, self._options)
            raise PlanningFailed(f"{name} cannot be planned: {said}; {report}") from own
        self._sessions.sizing.planned(kind, args, kwargs)
        if session.report is None:
            raise NotCapturedError(f"no graph could be captured of {session.model_name}: there is nothing to plan")
        return session.report

    def plan_or_admit(
        self, kind: Kind, eager_within: EagerWithinLimit, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """As `plan`; it is no error if such a call is going to run eagerly: without a budget, or within it.

        Raises:
            BudgetError, CaptureError: it cannot be planned, and not be run eagerly within the budget.
        """
        self._residents.look_around(args, kwargs)
        try:
            self._plan_if_possible(kind, args, kwargs)
            return
        except (NotCapturedError, BudgetError) as error:
            why = why_not(self._sessions.of(kind), error)
        called = self._fallback.kind(args, kwargs, kind)
        eager_within.admit(called, self._sessions.of(kind), kind, args, kwargs, why)

    def _plan_if_possible(self, kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """As `plan`; a failure inside memopt is a warning if there is no budget, as the model then runs eagerly."""
        try:
            if self._fallback.why_failed(self._fallback.kind(args, kwargs, kind)):
                return
            if self._options.budget is not None:
                self._residents.refuse_at_once(args, kwargs, kind)
                self._residents.count_optimizers()
                self._residents.refuse_hopeless(self._residents.of(args, kwargs, kind))
            self._planned(kind, args, kwargs)
        except Exception as error:
            if isinstance(error, PlanningFailed) and self._options.budget is None:
                log.warning("memopt: %s", error)
                return
            self._sessions.agreement.tell(error)  # the others hear of it in their first call
            raise

    def _plan(self, session: Session, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        with planning(session.model_name), session.timed("tracing"), collecting_rarely():
            programs = programs_of(self._model, args, kwargs, session)
            with no_autocast():  # the casts are in the programs
                training = [program for program in programs if program.training]
                if training:
                    self._plan_training(session, training, args, kwargs)
                else:
                    for program in dict.fromkeys(programs):
                        plan_inference(session, program)

    def _plan_training(self, session: Session, training: list[Program], args: Any, kwargs: Any) -> None:
        while True:
            traced_for = session.fallbacks.by_loss_alone.stage
            try:
                session.plan_training(training)
                return
            except BudgetError as error:
                session.fallbacks.plan_for_less(session, error)
            if session.fallbacks.by_loss_alone.stage != traced_for:
                training = [item for item in programs_of(self._model, args, kwargs, session) if item.training]
