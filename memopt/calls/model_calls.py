"""ModelCalls: the calls of one model: planned where they are new, and run as planned afterwards."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memopt.budget import BudgetError
from memopt.calls.beside_earlier import run_beside
from memopt.calls.call_ends import CallEnds
from memopt.calls.eager_within import EagerWithinLimit, why_not
from memopt.calls.failures import Failure, failure_of
from memopt.calls.fallback import Fallback
from memopt.calls.given_optimizers import GivenOptimizers
from memopt.calls.group import Group
from memopt.calls.guard_fast_path import FastPathGraph, Kind
from memopt.calls.kinds import Kinds
from memopt.calls.other_methods import OtherMethods
from memopt.calls.pace import pace_of
from memopt.calls.plan_ahead import PlanAhead
from memopt.calls.planned import PlannedCalls, set_back, was_planned
from memopt.calls.refusals import Refusals
from memopt.calls.residents import Residents
from memopt.calls.sessions import Sessions
from memopt.calls.several import SeveralCalls
from memopt.calls.stages import stages
from memopt.calls.steps_without_calls import StepsWithoutCalls, count_call
from memopt.calls.tracing import note_outside
from memopt.calls.transforms import Transformed
from memopt.calls.verified import verified
from memopt.calls.weak_sessions import make_way
from memopt.calls.whole_steps import unless_planned
from memopt.capture.export import CaptureError, NotCapturedError
from memopt.common.garbage import collect, collecting_rarely
from memopt.common.progress import planning
from memopt.compilation.layout import LayoutNeeded
from memopt.compilation.session import Session
from memopt.errors import ShortOfMemoryError
from memopt.memory.gradients import Gradients
from memopt.memory.reach import shown_tensors
from memopt.memory.window import closed_if_it_fails
from memopt.options import Options
from memopt.report.record import Report
from memopt.report.summary import summary
from memopt.step.call_role import CallRole, role_of
from memopt.step.earlier_calls import DoesNotFitBesideError, Figures, arguments_of
from memopt.step.guard import StepGuard
from memopt.step.optimizers import Optimizers
from memopt.step.sizes_apart import SizesError
from memopt.torch_compat.backward import backward_task
from memopt.torch_compat.fully_sharded import passes_results_on
from memopt.torch_compat.modules import has_disabled_forward, hooks_behind
from memopt.torch_compat.transforms import in_force

log = logging.getLogger("memopt")


class ModelCalls:
    """The calls of one model, by mode and shapes: what was planned for them, and how they run.

    It lies apart from the stand-in, whose attributes are the model's.

    Attributes:
        model: as the user gave it.
        options: what was asked for, without the optimizer, which is the `optimizers`' own.
        optimizers: those that were given for it.
        sessions: its compilations, by what plans go by: `Kind.plan`.
        guards: of the memory of the sessions' steps.
        fast_path: calls that go the guard fast path.
        earlier: the calls of the present step so far.
        several: plans the calls of a step together.
        residents: what the device holds in a call.
        planned: calls that go the long way.
        ahead: plans without running the model.
        gradients: whether the model's exist.
        kinds: tells of which kind a call is.
        transformed: calls that nothing is compiled through.
        fallback: calls that memopt failed at.
        others: the model's other methods; None without a budget.
        uncalled: optimizers' steps on gradients of no call; None without a budget.
        eager_within: calls that cannot be captured, and run within a budget.
        refusals: calls whose budget was refused.
        ends: what looks at calls, and is told of their ends.
        inlined: whether the stand-in is a part of a model that memopt compiles: it is compiled with that.
        reached: whether the stand-in's own `forward` was called since another was put in its place.
    """

    def __init__(self, model: nn.Module, options: Options, group: Group | None = None) -> None:
        """Nothing is compiled yet; other models of the group share the budget."""
        watch = options.budget is not None and options.target is None
        optimizers = Optimizers(model, options.optimizer, options.place, watch=watch)
        group = Group([model]) if group is None else group
        options = dataclasses.replace(options, optimizer=None)  # who holds one would keep its state
        self.model, self.options = model, options
        self.sessions = Sessions(model, options, optimizers, group)
        self.guards, self.fast_path, self.earlier = self.sessions.guards, self.sessions.fast_path, self.sessions.earlier
        self.several = SeveralCalls(model, options.budget, self.sessions)
        self.residents = Residents(model, options, optimizers, self.sessions, group)
        self.optimizers = GivenOptimizers(options, self.sessions, self.residents)
        self.planned = PlannedCalls(model, self.sessions)
        self.gradients, budgeted = Gradients(model), options.budget is not None
        self.kinds = Kinds(
            self.gradients,
            self.several,
            self.fast_path,
            budgeted=budgeted,
            planned=self.sessions.trains,
            hooked=lambda: not all(map(passes_results_on, hooks_behind(model))),
        )
        self.transformed = Transformed(model, budgeted=budgeted)
        self.fallback, self.refusals = Fallback(model, options), Refusals(model)
        self.others = OtherMethods(model, self.fallback.notes) if budgeted else None
        self.uncalled = StepsWithoutCalls(model, self.fallback.notes) if watch else None
        self.eager_within = EagerWithinLimit(model, options, self.sessions.around)
        self.ahead = PlanAhead(model, options, self.sessions, self.residents, self.fallback)
        self.ends = CallEnds(self.sessions, self.several, self.residents, budgeted=budgeted)
        self.inlined, self.reached = False, False
        self._trained = model.training  # whether it was in training's mode when it was compiled
        self._kind: Kind | None = None  # of the latest call
        self._roles: dict[Kind, CallRole] = {}  # of calls, as they went the long way

    def is_reached(self, reached: bool = True) -> None:
        """Whether the stand-in's own `forward` was called since another was put in its place."""
        self.reached = reached

    def is_part(self, inlined: bool = True) -> None:
        """Whether the stand-in is compiled with a model that it is a part of."""
        self.inlined = inlined

    @property
    def last(self) -> Session | None:
        """The session of the latest call."""
        return self.sessions.last

    @property
    def report(self) -> Report:
        """What the latest compilation did.

        Raises:
            RuntimeError: nothing was compiled yet.
        """
        self.sessions.around.close()
        return self.sessions.report(self.fallback.notes)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model as planned; plan first where these shapes and this mode are new.

        Raises:
            BudgetError: no plan keeps the budget. Nothing was run, and nothing of the model has changed.
            CaptureError: nothing can be planned, as graphs depend on the values of tensors or none can be captured, and
                what the model takes eagerly cannot be counted.
            MemoryError: the device had less memory left than the step needs.
        """
        count_call()
        around = in_force()
        if around:
            return self.transformed.call(around, args, kwargs)
        if self.sessions.hooked.changed(self.model) and self.sessions:
            self.sessions.forget_all()
        new_step = self.options.budget is not None and self.sessions.begins((args, kwargs))
        new_step = new_step and not self.sessions.group.alive(self.sessions)
        look = new_step and self.residents.others.begins()
        self.optimizers.recount_if_due()
        if look:
            self.residents.look_around(args, kwargs)
        if new_step:
            self.residents.plan_anew()
        kind, fast_path = self.kinds.find(args, kwargs, self._kind)
        if new_step and not look and fast_path is None and kind.plan not in self.sessions:
            self.residents.look_around(args, kwargs)
        try:
            return self._run(kind, fast_path, args, kwargs)
        except DoesNotFitBesideError as error:
            graph: Figures | None = error.graph
        except BudgetError:
            if not self.several.can_drop:
                raise
            graph = None
        self.several.expect(arguments_of(args, kwargs))
        return run_beside(self.sessions, self.several, kind, graph, lambda other: self._run(other, None, args, kwargs))

    def _run(self, kind: Kind, fast_path: FastPathGraph | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kind != self._kind:
            other = self._kind is not None and self._kind.gradients != kind.gradients
            make_way(self.sessions, functions=other and self.options.budget is not None)
        if self.sessions.graph_pool is not None:
            self.sessions.graph_pool.copy_out()
        self._kind = kind
        if fast_path is not None:
            try:
                return self._fast_path_call(fast_path.run, kind, args, kwargs)
            except (LayoutNeeded, SizesError):  # weights folded anew are laid out by the long way, and sizes planned
                pass
            finally:
                fast_path.end()
        if self.options.verify == "full" and not self.ends.verifying:
            return self._verified(kind, args, kwargs)
        called = self.fallback.kind(args, kwargs, kind)
        if self.fallback.has_failed(called):
            return self.model(*args, **kwargs)
        session, given = self.sessions.of(kind), bool(self.optimizers)
        self.sessions.last = session
        likely, trained = self._trained or given, given or self.sessions.group.has_trained(self.model)
        role = self._roles[kind] = role_of(self.model, gradients=kind.gradients, likely=likely, certain=trained)
        if session.report is None and not self.fallback.has_worked(called):
            self.residents.refuse_at_once(args, kwargs, kind)
        self.residents.count_optimizers()
        resident = functools.partial(self.residents.of, args, kwargs, kind)
        beside, refused = self.several.beside(session, args, kwargs), self.several.expecting(session, args, kwargs)
        with beside, session.call(resident, role), refused:
            if self.eager_within.admits(called, session, kind, args, kwargs):
                return self._run_within(session, called, kind, args, kwargs)
            try:
                return self._run_planned(session, called, kind, args, kwargs)
            except (NotCapturedError, BudgetError) as error:
                why = why_not(session, error)
            collect()
            self.eager_within.admit(called, session, kind, args, kwargs, why)
            return self._run_within(session, called, kind, args, kwargs)

    def _run_planned(self, session: Session, called: Any, kind: Kind, args: Any, kwargs: Any) -> Any:
        """Run a call as it is planned.

        Raises:
            NotCapturedError: it cannot be planned, and all that it has changed was set back.
        """
        self._refuse(called, kind, args, kwargs)
        kept, gradients = self.planned.before(session, kind), kind.gradients
        before = self.fallback.before(called, args, kwargs, **kept)
        guard = self.guards.setdefault(session, StepGuard())
        beyond, allowance = session.beyond if gradients else None, guard.allowance
        mark = session.outside.mark((args, kwargs) if gradients else ())
        step, planned, began = session.step, session.report, time.perf_counter()
        failure: Failure | None = None
        graphs, whole = self.sessions.graphs, copy.copy(self.sessions.reference)
        unplanned = self.options.budget is not None and session.report is None
        if unplanned and (self.eager_within.not_captured or has_disabled_forward(self.model)):
            # It is not run whole to find that nothing is captured: what it saves may be more than the budget.
            captured = self.planned.captures(session, args, kwargs)
            before.restore()  # a twin has the model's own objects
            if not captured:
                why = session.outside.rehearsed
                raise NotCapturedError(f"no graph could be captured of {session.model_name} ({why})")
        watch = self.ends.watch(session, kind, args, kwargs) if self.fallback.has_worked(called) else (None, None)
        try:
            with (
                guard.forward(beyond),
                planning(session.model_name) as plans,
                collecting_rarely(),
                closed_if_it_fails(watch[0]),
            ):
                outputs = self.planned.run(session, kind, before, args, kwargs)
            if self.options.budget is not None and self.sessions.graphs != graphs:
                collect()  # Dynamo leaves what it has traced in cycles: what a loop replaces would stay beside the next
        except torch.OutOfMemoryError as error:
            raise ShortOfMemoryError(session.short_of_memory(error)) from None
        except (BudgetError, DoesNotFitBesideError) as error:  # what was named was tried within limits of its own
            guard.allowance = allowance
            if isinstance(error, BudgetError) and planned is not None:  # calls of other sizes go on as before
                session.goes_back_to(step)
                session.reports(planned)
            if isinstance(error, BudgetError) and not (error.beside and session.beside_in_step):
                self.refusals.keep(called, self.residents.of(args, kwargs, kind), error)
            raise
        except Exception as error:
            failure = failure_of(error, self.options)
            if failure is None and isinstance(error, NotCapturedError):
                guard.allowance = allowance
                set_back(before, error)
            if failure is None:
                raise
        if failure is not None:
            limit = session.limit(0) or None
            self.sessions.reference.return_to(whole)
            try:  # an error of the model's own comes through: what is planned serves the next call
                outputs = self.fallback.answer(failure, called, before, args, kwargs, limit=limit)
            except CaptureError as error:
                guard.allowance = allowance
                if not isinstance(error, NotCapturedError):
                    self.sessions.drop(kind.plan)
                raise
            self.sessions.drop(kind.plan)
            return outputs
        known = session.report is not planned or self.fallback.has_worked(called)
        if not was_planned(self.model, session, shown_tensors(outputs), known):
            told = session.outside.line_of_all(self.model, shown_tensors(outputs), mark)
            if watch[0] is not None:
                watch[0].close()
            del outputs, mark
            refused = NotCapturedError(f"no graph could be captured of {session.model_name} ({told})")
            set_back(before, refused)
            raise refused
        self.fallback.works(called)
        session.is_planned()
        if session.report is not None and session.report is not planned:
            line = summary(session.report, time.perf_counter() - began, gradients=gradients)
            log.info("%s: %s", session.model_name, line)
            if session.step is not None and session.step.planned:  # not a warm start
                pace_of(session).took(plans.nodes, plans.seconds)
        note_outside(session, self.model, shown_tensors(outputs), mark)
        self.ends.returned(session, outputs, args, kwargs, planned=session.report is not planned)
        if gradients:
            self.sessions.group.trains(self.model)
            watch = unless_planned(session.report is not planned, watch)
            self.ends.awaits_backward(session, guard, outputs, args, kwargs, watch)
        symbolic = self.planned.symbolic
        self.fast_path.learn(kind, self.sessions.function(kind, symbolic=symbolic), args, kwargs, symbolic=symbolic)
        return outputs

    def _run_within(self, session: Session, called: Any, kind: Kind, args: Any, kwargs: Any) -> Any:
        """Run the model eagerly, within the limit of the budget."""
        guard = self.guards.setdefault(session, StepGuard())
        # Of a call within backward (a reentrant checkpoint) autograd would end a recording unseen.
        look = not self.ends.verifying and backward_task() == -1
        try:
            with guard.forward():
                outputs, watch = self.eager_within.run(called, session, kind, args, kwargs, look=look)
        except torch.OutOfMemoryError as error:
            raise ShortOfMemoryError(session.short_of_memory(error)) from None
        self.ends.returned(session, outputs, args, kwargs, planned=False)
        if kind.gradients:
            self.ends.awaits_backward(session, guard, outputs, args, kwargs, watch)
        return outputs

    def _verified(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model through Dynamo, and where that compiles anything, beside the model itself."""
        self.ends.verifying = True
        try:
            return verified(
                self.model,
                args,
                kwargs,
                lambda: self._run(kind, None, args, kwargs),
                lambda: self.sessions.graphs,
                lambda: stages(self.optimizers.asked_for(), functools.partial(ModelCalls, self.model)),
                draws_alike=self.options.engine.exact,
                many_sizes=lambda: self.planned.symbolic,
            )
        finally:
            self.ends.verifying = False

    def _refuse(self, called: Any, kind: Kind, args: Any, kwargs: Any) -> None:
        """Refuse at once what was refused before, and what cannot be planned.

        Raises:
            BudgetError: nothing of the call has changed since, or the budget does not hold what is there anyway.
        """
        if self.options.budget is None or self.fallback.has_worked(called):
            return
        self.residents.count_optimizers()
        resident = self.residents.of(args, kwargs, kind)
        self.refusals.raise_known(called, resident)
        self.residents.refuse_hopeless(resident)

    def plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Report:
        """Plan for these inputs without running the model.

        Raises:
            BudgetError: no plan keeps the budget.
            CaptureError: the model's control flow depends on the values of tensors, or no graph can be captured.
        """
        return self.ahead.plan(self.kinds.alone(), args, kwargs)

    def plan_ahead(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """As `plan`; it is no error if the model is going to run eagerly: without a budget, or within it."""
        self.ahead.plan_or_admit(self.kinds.alone(), self.eager_within, args, kwargs)

    def _fast_path_call(self, run: Callable[..., Any], kind: Kind, args: Any, kwargs: Any) -> Any:
        """Run what was compiled for such a call; without gradients it plans anew where it folds weights anew."""
        gradients, session = kind.gradients, self.sessions[kind.plan]
        if self.sessions.last is not session:
            self.sessions.last = session
        guard, watch = self.guards[session], self.ends.watch(session, kind, args, kwargs)
        report = session.report
        try:
            with (
                closed_if_it_fails(watch[0]),
                self.several.beside(session, args, kwargs),
                session.call(lambda: self.residents.of(args, kwargs, kind), self._roles.get(kind)),
            ):
                if guard.allowance is None:
                    outputs = run(*args, **kwargs)
                else:
                    with guard.forward(session.beyond if gradients else None):
                        outputs = run(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise ShortOfMemoryError(session.short_of_memory(error)) from None
        counted = session.report is not report  # for larger sizes than before
        self.ends.returned(session, outputs, args, kwargs, planned=counted)
        if gradients:
            self.ends.awaits_backward(session, guard, outputs, args, kwargs, unless_planned(counted, watch))
        return outputs
