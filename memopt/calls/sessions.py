"""The sessions of one model, by kind of call: each with its compiled function and the guard of its steps' memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx, nn

from memopt.backends.cuda_capture import CudaGraphCapturer
from memopt.budget import format_bytes
from memopt.calls.agreement import Agreement
from memopt.calls.group import Group
from memopt.calls.guard_fast_path import Backend, FastPathCalls, Kind, Plan
from memopt.calls.part_of_step import is_part
from memopt.calls.sizing import Sizing, Symbolic
from memopt.calls.steps_over import StepsOver
from memopt.calls.tracing import dynamo_backend
from memopt.calls.weak_sessions import (
    allow_limit,
    gradients_of,
    kept_more,
    look_alone,
    look_at,
    models_waiting,
    names_of,
    older_outputs,
    planning_available,
    release,
    release_inference,
    reserved_for_others,
    uncounted_others,
)
from memopt.calls.whole_steps import WholeSteps
from memopt.compilation.layout import movable_parameters
from memopt.compilation.session import Session
from memopt.cuda_graphs.pool import GraphPool
from memopt.memory.addresses import addresses
from memopt.memory.cost.table import CostTable
from memopt.memory.distributed import has_group
from memopt.memory.resident import Resident
from memopt.memory.window import unseen
from memopt.options import Options
from memopt.report.record import Report
from memopt.step.around import Around
from memopt.step.before_calls import BEFORE
from memopt.step.earlier_calls import EAGER, EarlierCalls, Ran
from memopt.step.guard import StepGuard, allowance_of
from memopt.step.hooked import Hooked, early_gradients
from memopt.step.loop_bytes import Seen
from memopt.step.open_window import Ended, Watch
from memopt.step.optimizers import Optimizers
from memopt.step.plan_transfer import Sizes
from memopt.step.reference import Reference
from memopt.torch_compat.changing_numbers import ChangingNumbers
from memopt.torch_compat.dynamo import Kept, compiled_module, with_own_entry
from memopt.torch_compat.fully_sharded import is_sharded
from memopt.torch_compat.saved_tensors import hooks_in_force


class NotPlanned(RuntimeError, AttributeError):
    """There is no report yet: an attribute that is not there, for who looks through a module's attributes."""


class Sessions(Mapping[Plan, Session]):
    """The compilations of one model, by what plans go by: `Kind.plan`.

    Attributes:
        compiled: what `torch.compile` made of the model, by the same.
        guards: of the memory of the sessions' steps.
        fast_path: calls that go the guard fast path.
        sizing: which calls are captured with symbolic sizes.
        earlier: the calls of the present step so far.
        optimizers: that step the model.
        group: models that share the budget.
        agreement: of the ranks that train the model, on their first step.
        reference: what a budget is a fraction of.
        around: what the loop holds around the model's graphs.
        whole_steps: what its steps take beyond all that is counted.
        hooked: the model's parameters whose gradients hooks hand over within backward.
        last: the session of the latest call.
        graph_pool: where training steps are captured; None where they are not.
        graphs: how many graphs were compiled.
    """

    def __init__(self, model: nn.Module, options: Options, optimizers: Optimizers, group: Group) -> None:
        """Nothing is compiled yet; other models of the group share the budget."""
        self._model, self._options, self.optimizers = model, options, optimizers
        ceiling = None if options.budget is None else options.budget.bytes
        available = functools.partial(planning_available, weakref.ref(self))
        self._table = CostTable(
            ceiling_bytes=ceiling, available=available, target=options.target, estimates=options.budget is None
        )
        self.agreement = Agreement(model, due=options.budget is not None)
        self.numbers = ChangingNumbers(type(model).__name__)
        self._sizes = Sizes()
        self._sessions: dict[Plan, Session] = {}
        self._report: Report | None = None  # of before the model was moved
        self._over = StepsOver()
        self.compiled: dict[Plan, Callable[..., Any]] = {}
        self._backends: weakref.WeakKeyDictionary[Any, Kept] = weakref.WeakKeyDictionary()  # by compiled function
        # The same of calls with symbolic sizes, and whether all sizes are symbols.
        self._symbolic: dict[tuple[Plan, bool], Callable[..., Any]] = {}
        self.sizing = Sizing(model, options)
        self.guards: dict[Session, StepGuard] = {}
        self.fast_path = FastPathCalls(model)
        self.earlier = EarlierCalls()
        self.group, self.reference = group, group.reference
        group.joined(self)
        self.around = Around()
        self.whole_steps = WholeSteps(model, self.around, functools.partial(look_alone, weakref.ref(self)))
        self.hooked = Hooked(model)
        self.last: Session | None = None
        self.graph_pool: GraphPool | None = None
        self.graphs = 0
        weakref.finalize(self, release, self._sessions).atexit = False

    def __getitem__(self, plan: Plan) -> Session:
        return self._sessions[plan]

    def __iter__(self) -> Iterator[Plan]:
        return iter(self._sessions)

    def __len__(self) -> int:
        return len(self._sessions)

    def report(self, notes: Sequence[str]) -> Report:
        """What the latest compilation did, with these notes beside its own.

        Raises:
            RuntimeError: nothing was compiled yet.
        """
        session = self.last
        if session is None or (session.report is None and self._report is not None):
            if self._report is not None:
                return dataclasses.replace(self._report, notes=(*self._report.notes, *notes)) if notes else self._report
            if notes:
                raise NotPlanned(f"nothing is planned: {notes[-1]}")
            raise NotPlanned("nothing is planned yet: call the model once, or pass example_inputs to memopt.compile")
        if session.report is None:
            refused, name = "its call was refused, or " if session.budget else "", session.model_name
            raise NotPlanned(f"nothing is planned: {refused}no graph could be captured of {name}, which runs eagerly")
        report = session.report
        limit = None if self.reference.training is None else session.limit(0)
        if limit is not None and report.budget_bytes not in (None, limit):  # a step that was seen later told more of it
            report = dataclasses.replace(report, budget_bytes=limit)
        return dataclasses.replace(report, notes=(*report.notes, *notes)) if notes else report

    def of(self, kind: Kind) -> Session:
        """The session of a kind of call, made where there is none yet."""
        if kind.plan not in self._sessions:
            self._sessions[kind.plan] = self._made(kind)
        return self._sessions[kind.plan]

    def trains(self, kind: Kind) -> bool:
        """Whether a step of training is planned for calls of a kind."""
        session = self._sessions.get(kind.plan)
        return session is not None and session.fallbacks.by_loss_alone.has_seen

    def _made(self, kind: Kind) -> Session:
        options = self._options
        session = Session(
            budget=options.budget,
            backend=options.engine,
            passes=options.passes,
            verify=options.verify,
            names=functools.partial(names_of, weakref.ref(self._model)),
            resident=Resident(),
            table=self._table,
            model_name=type(self._model).__name__,
            sizes=self._sizes,
            reference=self.reference,
            numbers=self.numbers,
            frozen="freeze" in options.allow,
            early=early_gradients(self._model, self.hooked, alone=kind.alone, accumulating=kind.accumulating),
            whole_step=True,
            movable=movable_parameters(self._model) if options.engine.lays_out else (),
        )
        for text in (*self.hooked.notes(accumulating=kind.accumulating), *options.notes, *self._over.said):
            session.note(text)
        session.sees(self._seen(kind.plan))
        session.fallbacks.is_for(kind.loss_alone)
        here = weakref.ref(self)
        session.joins(
            calls=kind.calls,
            known=self.earlier,
            elsewhere=self.group.elsewhere,
            waiting=functools.partial(models_waiting, here),
            part=functools.partial(is_part, weakref.ref(self._model), self.optimizers.instances),
            older=functools.partial(older_outputs, here),
            uncounted=functools.partial(uncounted_others, here, counts_all=session.counts_all),
            reserve=functools.partial(reserved_for_others, here),
        )
        session.runs_here(self._graph_pool_here(), functools.partial(allow_limit, here, weakref.ref(session)))
        return session

    def function(self, kind: Kind, *, symbolic: bool = False) -> Callable[..., Any]:
        """What `torch.compile` makes of the model for a kind of call; its graphs go to the session of that kind.

        Args:
            kind: of call.
            symbolic: whether its sizes are symbols.
        """
        if not self.has_function(kind, symbolic=symbolic):
            every = symbolic and self._every(kind)
            kept = Kept(dynamo_backend(self.of(kind), symbolic=symbolic))
            backend = self._counted(self.fast_path.noting(kept.while_kept(), kind.plan, symbolic=symbolic))
            made = with_own_entry(compiled_module(self._model, backend, dynamic=every))
            self._backends[made] = kept
            if symbolic:
                self._symbolic[kind.plan, every] = made
            else:
                self.compiled[kind.plan] = made
        return self._symbolic[kind.plan, self._every(kind)] if symbolic else self.compiled[kind.plan]

    def _every(self, kind: Kind) -> bool:
        """Whether all sizes are symbols in a call with symbols of this kind."""
        return kind.gradients and bool(self._options.dynamic)

    def has_function(self, kind: Kind, *, symbolic: bool) -> bool:
        """Whether there is already what `torch.compile` makes of the model for a kind of call."""
        return (kind.plan, self._every(kind)) in self._symbolic if symbolic else kind.plan in self.compiled

    def outgrown(self, kind: Kind, symbolic: Symbolic, reason: str, *, others: bool) -> None:
        """Code for many sizes does not serve a call, or none is to be had; see `Sizing.outgrown`."""
        if self.sizing.outgrown(kind, self.of(kind), symbolic, reason, others=others):
            self._symbolic.pop((kind.plan, True), None)

    def forget_symbolic(self, kind: Kind) -> None:
        """Make code for many sizes anew for calls of these kinds."""
        self._symbolic.pop((kind.plan, self._every(kind)), None)
        self.fast_path.forget_symbolic(kind.plan)

    def begins(self, given: Any = ()) -> bool:
        """A call begins: what the loop held around the last one is known, and steps that were over are planned anew.

        Args:
            given: its arguments.

        Returns:
            Whether a new step begins.
        """
        new_step = not self.earlier.alive()
        self.group.begins(self)
        left, before, beside = self.around.close(), self.around.seen, self.group.others.beside_step
        self._over.see_apart(self.around, beside, self.last)
        if self.around.seen != before and self._over.latest is not None:
            self.look(*self._over.latest)
        self.around.begins(0 if new_step else left, new_step=new_step, given=given)
        if self.around.seen != before:
            self._over.sees_more({session: self._seen(plan) for plan, session in self._sessions.items()})
        if new_step and not has_group():  # ranks plan the same
            due = self._over.due()
            for plan in [plan for plan, session in self._sessions.items() if session in due]:
                self.forget(plan)
        return new_step

    def ended(self, session: Session, outputs: Any, given: Any, watch: Watch = (None, None)) -> None:
        """A call with gradients has returned: look at what the loop does with its outputs.

        Args:
            session: of the call.
            outputs: of it.
            given: its arguments.
            watch: a window that is open since before the call, and what is called with the whole that it has seen.
        """
        window, whole = watch
        if window is not None and (not session.ran or hooks_in_force()):
            window.close()
        elif session.ran and not hooks_in_force():
            calls = self.earlier.alive() or [Ran(tuple(session.ran), {})]
            self._over.ran(session, calls)
            self.whole_steps.ended(session)
            look = functools.partial(look_at, weakref.ref(self), weakref.ref(session), calls, self.group.alive(self))
            early = 0 if session.ran[0].key == EAGER else session.allowance.tangents.early
            model = weakref.ref(self._model)
            key, device = session.ran[0].key, session.device
            lets_go = bool(session.fallbacks.by_loss_alone.held)
            kept = functools.partial(kept_more, weakref.ref(session), calls)
            number, gradients = len(calls), functools.partial(gradients_of, model)
            last, let_go = number >= session.calls, sum(ran.let_go for ran in calls)
            call = Ended(key, device, early, gradients, window, whole, lets_go, kept, number, last, let_go)
            self.around.ended(call, session.with_results(outputs), given, look)
            where = unseen(device) if session.budget is not None else ""
            if where:
                session.note(
                    f"what the loop holds around the model's calls is not seen {where}: it is beside the budget"
                )
            if session.budget is not None and not session.soft:
                BEFORE.expect(device, self.around, in_steps=not session.counts_all)

    def _seen(self, plan: Plan | None) -> Seen:
        """What is known of the loop, and of steps that are planned so."""
        return self.around.seen if plan is None else self.around.seen.joined(self.whole_steps.seen.get(plan, Seen()))

    def look(self, session: Session, calls: Sequence[Ran], beside: Sequence[Ran] = ()) -> None:
        """Look whether a step of these calls, beside others, was over its budget, with what is known of its loop."""
        plan = next((plan for plan, each in self._sessions.items() if each is session), None)
        loop = self.around.take_loop()
        self._over.look(session, self._seen(plan), calls, loop, beside)
        guard, limit = self.guards.get(session), None if loop is None or session.soft else session.limit(0)
        if guard is not None and limit is not None:
            guard.lowers(limit)

    def drop(self, plan: Plan) -> None:
        """Drop a session that failed in the middle of its work, with all that it compiled; its last report stays."""
        session = self._sessions[plan]
        self.forget(plan)
        self.fast_path.clear()
        if self.last is session:
            self._report, self.last = session.report or self._report, None

    def forget(self, plan: Plan) -> None:
        """Plan calls of these kinds anew."""
        session = self._sessions.pop(plan, None)
        if session is not None:
            release({plan: session})
            self.guards.pop(session, None)
        self.lower_anew(plan)

    def lower_anew(self, plan: Plan) -> None:
        """Trace calls of these kinds anew, for the same session."""
        self.compiled.pop(plan, None)
        for every in (False, True):
            self._symbolic.pop((plan, every), None)
        self.fast_path.forget(plan)

    def forget_all(self) -> None:
        """Forget all plans: of the same model, whose fraction stays one of the same bytes."""
        release(self._sessions)
        self._sessions.clear()
        self.compiled.clear()
        self._symbolic.clear()
        self.guards.clear()
        self.earlier.clear()
        self.fast_path.clear()
        self._over.forget()
        self._sizes = Sizes()
        self.sizing.forget()
        if self.last is not None and self.last.report is not None:
            self._report, self.last = self.last.report, None

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Within: the model's tensors may be moved or cast. If any was, all plans are made anew; the report stays."""
        before = addresses(self._model)
        try:
            yield
        finally:
            if addresses(self._model) != before:
                self.forget_model()

    def forget_model(self) -> None:
        """Forget all plans, and what fractions are of: the model lies elsewhere now, or is of another dtype."""
        self.forget_all()
        self.reference = Reference()

    def _graph_pool_here(self) -> GraphPool | None:
        """Where training steps are captured, the same for all of them; None where they cannot be."""
        if is_sharded(self._model) or (self.group.several and self._options.budget is not None):
            return None  # what is gathered lies elsewhere in each step; other models of the budget have it in turn
        if self.graph_pool is None and any(parameter.is_cuda for parameter in self._model.parameters()):
            self.graph_pool = GraphPool(CudaGraphCapturer(), functools.partial(gradients_of, weakref.ref(self._model)))
        return self.graph_pool

    def _counted(self, backend: Backend) -> Backend:
        """The same backend; graphs are counted, and none runs before all ranks have the first."""
        here = weakref.ref(self)

        def memopt(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            sessions = here()
            if sessions is None:
                raise RuntimeError("what memopt.compile returned is gone, and its compiled functions with it")
            sessions.graphs += 1
            run: Callable[..., Any] = backend(graph_module, example_inputs)
            sessions.agreement.reach()
            return run

        return memopt

    def allow(self, session: Session, limit_bytes: int) -> None:
        """Make the budget the limit of the device's allocator in the steps of this session."""
        if session.resident.device.type != "cuda":
            return
        guard = self.guards.setdefault(session, StepGuard())
        state = self.optimizers.state_bytes()
        whole = session.budget is not None and session.budget.bytes is not None
        given = self._model, state, session.resident, limit_bytes, guard.allowance
        give_back = functools.partial(release_inference, self._sessions)
        allowance = allowance_of(*given, whole=whole, tried=session.one_graph, give_back=give_back)
        guard.allow(allowance)
        if whole and allowance.beyond_bytes:
            beyond = format_bytes(allowance.beyond_bytes, short=True)
            session.note(f"{beyond} of the device that no tensor shows (libraries, others' CUDA graphs) come on top")
        for optimizer in self.optimizers.instances():
            guard.during(optimizer)
