"""ModelCalls: the calls of one model: planned where they are new, and run as planned afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from memopt.backends.aten import AtenBackend
from memopt.backends.recorder import CudaRecorder
from memopt.budget import BudgetError
from memopt.call_start import CallStart
from memopt.capture.export import CaptureError
from memopt.capture.shadow import model_names
from memopt.failures import failure_of
from memopt.fallback import Fallback
from memopt.garbage import collecting_rarely
from memopt.layout import LayoutNeeded, lay_out, movable_parameters
from memopt.memory.addresses import addresses
from memopt.memory.cost.table import CostTable
from memopt.memory.gradients import Gradients
from memopt.memory.optimizers import NONE
from memopt.memory.resident import Resident, resident_of
from memopt.one_piece import in_one_piece
from memopt.options import Options
from memopt.pass_manager import Pass
from memopt.program import Program
from memopt.progress import planning, stage
from memopt.recording.pool import Pool
from memopt.refusals import Refusals, refuse_hopeless
from memopt.report.record import Report
from memopt.report.summary import summary
from memopt.session import Session, WholeStepNeeded
from memopt.steady import Backend, Kind, Plan, SteadyCalls, SteadyGraph
from memopt.step.account import Account
from memopt.step.carry import Sizes
from memopt.step.earlier_calls import EarlierCalls, KnownCalls, NoRoomBesideError, Ran, arguments_beside, arguments_of
from memopt.step.guard import StepGuard, allowance_of
from memopt.step.hooked import KEPT, Hooked
from memopt.step.inference import plan_inference
from memopt.step.optimizers import Optimizers
from memopt.step.planned import fingerprint
from memopt.step.recount import recount
from memopt.step.reference import Reference
from memopt.step.whole import settled
from memopt.torch_compat.changing_numbers import ChangingNumbers
from memopt.torch_compat.transforms import in_force
from memopt.tracing import collect, dynamo_backend, dynamo_settings, note_outside
from memopt.verified import verified

log = logging.getLogger("memopt")


class NotPlanned(RuntimeError, AttributeError):
    """There is no report yet: an attribute that is not there, for who looks through a module's attributes."""


class PlanningFailed(CaptureError):
    """Planning failed inside memopt."""


class ModelCalls:
    """The calls of one model, by mode and shapes: what was planned for them, and how they run.

    It lies apart from the stand-in, whose attributes are the model's.

    Attributes:
        model: as the user gave it.
        options: what was asked for.
        sessions: its compilations, by what plans go by: `Kind.plan`.
        compiled: what `torch.compile` made of the model, by the same.
        guards: of the memory of the sessions' steps.
        steady: calls that go the guard fast path.
        last: the session of the latest call.
        recordings: where training steps are recorded; None where they are not.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        """Nothing is compiled yet."""
        self.model, self.options = model, options
        ceiling = None if options.budget is None else options.budget.bytes
        self.table = CostTable(ceiling_bytes=ceiling, target=options.target)
        watch = options.budget is not None and options.target is None
        self.optimizers = Optimizers(model, options.optimizer, options.place, watch=watch)
        self.hooked = Hooked(model)
        self.sessions: dict[Plan, Session] = {}
        self.compiled: dict[Plan, Callable[..., Any]] = {}
        self.earlier = EarlierCalls()
        self.together = 1  # calls of the present step that are planned together
        self.guards: dict[Session, StepGuard] = {}
        self.steady = SteadyCalls(model)
        self.gradients = Gradients(model)
        self.sizes = Sizes()
        self.reference = Reference()  # of a budget that is a fraction
        self.trained = model.training  # whether it was in training's mode when it was compiled
        self.numbers = ChangingNumbers(type(model).__name__)
        self.fallback, self.refusals = Fallback(model, options), Refusals(model)
        self.last: Session | None = None
        self.recordings: Pool | None = None
        self.inlined = False  # whether the stand-in is a part of a model that memopt compiles: it is compiled with that
        self._kind: Kind | None = None  # of the latest call
        self._said: set[str] = set()  # what runs as it is, told once
        self._report: Report | None = None  # of before the model was moved
        self._graphs = [0]  # how many were compiled
        self._verifying = False  # whether a call is run to be compared with the model's own
        weakref.finalize(self, _release, self.sessions).atexit = False

    @property
    def report(self) -> Report:
        """What the latest compilation did.

        Raises:
            RuntimeError: nothing was compiled yet.
        """
        session, notes = self.last, tuple(self.fallback.notes)
        if session is None or (session.report is None and self._report is not None):
            if self._report is not None:
                return dataclasses.replace(self._report, notes=(*self._report.notes, *notes)) if notes else self._report
            if notes:
                raise NotPlanned(f"nothing is planned: {notes[-1]}")
            raise NotPlanned("nothing is planned yet: call the model once, or pass example_inputs to memopt.compile")
        if session.report is None:
            raise NotPlanned(
                f"nothing is planned: no graph could be captured of {session.model_name}, it runs as it is"
            )
        report = session.report
        return dataclasses.replace(report, notes=(*report.notes, *notes)) if notes else report

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model as planned; plan first where these shapes and this mode are new.

        Raises:
            BudgetError: no plan keeps the budget. Nothing was run, and nothing of the model has changed.
            CaptureError: the budget cannot be kept, as graphs depend on the values of tensors, or none can be captured.
            MemoryError: the device had less memory left than the step needs.
        """
        around = in_force()
        if around:
            return self._run_as_it_is(around, args, kwargs)
        if self.hooked.changed(self.model) and self.sessions:
            self._plan_anew()
        if self.optimizers.due():
            self._recount()
        kind, steady = self._find_steady(args, kwargs)
        try:
            return self._run(kind, steady, args, kwargs)
        except NoRoomBesideError:
            kind = kind._replace(calls=1, beside=True)
            self._expect_calls(arguments_of(args, kwargs))
        if kind.plan in self.sessions:
            with contextlib.suppress(NoRoomBesideError):
                return self._run(kind, None, args, kwargs)
            self._forget_plan(kind.plan)
        self._session(kind).last_word = True
        try:
            return self._run(kind, None, args, kwargs)
        finally:
            self._session(kind).last_word = False

    def _run(self, kind: Kind, steady: SteadyGraph | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.recordings is not None:
            if kind != self._kind:
                self.recordings.release()  # a call of another kind needs the memory
            self.recordings.settle()
        self._kind = kind
        if steady is not None:
            try:
                return self._steady_call(steady.run, kind, args, kwargs)
            except LayoutNeeded:  # of weights that were folded anew: the long way lays them out
                pass
            finally:
                steady.end()
        if self.options.verify == "full" and not self._verifying:
            return self._verified(kind, args, kwargs)
        called = self.fallback.kind(args, kwargs, kind)
        if self.fallback.has_failed(called):
            return self.model(*args, **kwargs)
        before = self.fallback.before(called)
        self._refuse(called, kind, args, kwargs)
        session, gradients = self._session(kind), kind.gradients
        self.last = session
        trainable = any(parameter.requires_grad for parameter in self.model.parameters())
        session.trains, likely = gradients and trainable, self.trained or self.options.optimizer is not None
        session.to_be_trained = trainable and not gradients and likely
        self._count_optimizers()
        guard = self.guards.setdefault(session, StepGuard())
        beyond, allowance = session.beyond if gradients else None, guard.allowance
        mark = session.outside.mark((args, kwargs) if gradients else ())
        planned, began = session.report, time.perf_counter()
        with self._beside(session, args, kwargs), session.call(lambda: self._resident(args, kwargs, kind)):
            try:
                with guard.forward(beyond), planning(session.model_name), collecting_rarely():
                    outputs = self._planned_call(session, kind, args, kwargs)
            except torch.OutOfMemoryError as error:
                raise MemoryError(session.short_of_memory(error)) from None
            except (BudgetError, NoRoomBesideError) as error:  # what was named was tried within limits of its own
                guard.allowance = allowance
                if isinstance(error, BudgetError) and not error.beside:
                    self.refusals.keep(called, self._resident(args, kwargs, kind), error)
                raise
            except Exception as error:
                failure = failure_of(error, self.options)
                if failure is None:
                    raise
            else:
                failure = None
        if failure is not None:
            self._drop(kind.plan)
            return self.fallback.answer(failure, called, before, args, kwargs)
        self.fallback.works(called)
        if session.report is not None and session.report is not planned:
            log.info("%s: %s", session.model_name, summary(session.report, time.perf_counter() - began))
        if session.report is None and session.budget is not None and next(self.model.parameters(), None) is not None:
            raise CaptureError(f"no graph could be captured of {session.model_name}: it cannot be held to a budget")
        note_outside(session, self.model, outputs, mark)
        if gradients:
            self._note(session, outputs, args, kwargs)
            guard.backward(outputs)
        self.steady.learn(kind, self.compiled[kind.plan], args, kwargs)
        return outputs

    def _verified(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model through Dynamo, and where that compiles anything, beside the model itself."""
        self._verifying = True
        try:
            return verified(
                self.model,
                args,
                kwargs,
                lambda: self._run(kind, None, args, kwargs),
                lambda: self._graphs[0],
                self._stages,
                draws_alike=self.options.engine.exact,
            )
        finally:
            self._verifying = False

    def _stages(self) -> list[tuple[str, Callable[..., Any]]]:
        """Calls of the model, operator by operator, with less than all that is done to it, the least first."""

        def stage(passes: tuple[Pass, ...] | None) -> Callable[..., Any]:
            plain = dataclasses.replace(self.options, budget=None, optimizer=None, verify=False, allow=())
            calls = ModelCalls(self.model, dataclasses.replace(plain, engine=AtenBackend(), passes=passes))
            return lambda *args, **kwargs: calls.run(args, kwargs)

        return [("captured program", stage(())), ("passes", stage(self.options.passes))]

    def _refuse(self, called: Any, kind: Kind, args: Any, kwargs: Any) -> None:
        """Refuse at once what was refused before, and what cannot be planned.

        Raises:
            BudgetError: nothing of the call has changed since, or the budget does not hold what is there anyway.
        """
        if self.options.budget is None or self.fallback.has_worked(called):
            return
        self._count_optimizers()
        resident = self._resident(args, kwargs, kind)
        self.refusals.raise_known(called, resident)
        refuse_hopeless(Account(self.options.budget, dataclasses.replace(resident, outside=0)), self.model)

    def _run_as_it_is(self, around: str, args: Any, kwargs: Any) -> Any:
        """Call the model within something that nothing is compiled through."""
        name = type(self.model).__name__
        if self.options.budget is not None:
            raise CaptureError(
                f"{around} is not planned through, so that {name} keeps no budget there: call the original model"
            )
        if around not in self._said:
            self._said.add(around)
            log.info("memopt: within %s %s runs as it is", around, name)
        return self.model(*args, **kwargs)

    @in_one_piece
    def plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Report:
        """Plan for these inputs without running the model.

        Raises:
            BudgetError: no plan keeps the budget.
            CaptureError: the model's control flow depends on the values of tensors, or no graph can be captured.
        """
        kind = Kind(torch.is_grad_enabled(), self._accumulating())
        session = self._session(kind)
        self._count_optimizers()
        session.resident = self._resident(args, kwargs, kind)
        self.last = session
        failure = None
        try:
            self._plan(session, args, kwargs)
        except Exception as error:
            failure = failure_of(error, self.options)
            if failure is None:
                raise
        if failure is not None:
            self._drop(kind.plan)
            own = self.fallback.error_of_model(args, kwargs)
            if own is not None:
                raise own
            name, report = session.model_name, failure.save(session.model_name, self.options)
            raise PlanningFailed(f"{name} cannot be planned: memopt failed ({failure.line}); {report}")
        if session.report is None:
            raise CaptureError(f"no graph could be captured of {session.model_name}: there is nothing to plan")
        return session.report

    def _plan(self, session: Session, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        with planning(session.model_name), session.timed("tracing"), collecting_rarely():
            programs = self._programs(session, args, kwargs)
            with torch._C._DisableAutocast():  # the casts are in the programs
                if any(program.training for program in programs):
                    session.plan_training([program for program in programs if program.training])
                else:
                    for program in dict.fromkeys(programs):
                        plan_inference(session, program)

    def plan_ahead(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """As `plan`; a failure inside memopt is only told if there is no budget, as the model would run as it is."""
        if self.options.budget is not None:
            self._count_optimizers()
            kind = Kind(torch.is_grad_enabled(), self._accumulating())
            resident = self._resident(args, kwargs, kind)
            refuse_hopeless(Account(self.options.budget, dataclasses.replace(resident, outside=0)), self.model)
        try:
            self.plan(args, kwargs)
        except PlanningFailed as error:
            if self.options.budget is not None:
                raise
            log.warning("memopt: %s", error)

    def set_optimizer(self, optimizer: Any) -> None:
        """Count this optimizer in place of what was given before; plans that do not keep the budget then are dropped.

        Raises:
            TypeError: it is neither an optimizer, nor several, nor what makes one.
            ValueError: it holds none of the model's parameters that are trained.
        """
        before = self.options.optimizer
        self.optimizers.replace(optimizer)
        self.options = dataclasses.replace(self.options, optimizer=optimizer)
        try:
            self._recount()
        except ValueError:
            self.set_optimizer(before)
            raise

    # -- inside --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Within: the model's tensors may be moved or cast. If any was, all plans are made anew; the report stays."""
        before = addresses(self.model)
        try:
            yield
        finally:
            if addresses(self.model) != before:
                self._forget()

    def _forget(self) -> None:
        _release(self.sessions)
        self.sessions.clear()
        self.compiled.clear()
        self.guards.clear()
        self.earlier = EarlierCalls()
        self.steady = SteadyCalls(self.model)
        self.sizes = Sizes()
        self.reference = Reference()
        if self.last is not None and self.last.report is not None:
            self._report, self.last = self.last.report, None

    def _drop(self, plan: Plan) -> None:
        """Drop a session that failed in the middle of its work, with all that it compiled; its last report stays."""
        session = self.sessions.pop(plan)
        _release({plan: session})
        self.compiled.pop(plan, None)
        self.guards.pop(session, None)
        self.steady = SteadyCalls(self.model)
        if self.last is session:
            self._report, self.last = session.report or self._report, None

    def _plan_anew(self) -> None:
        """Forget all plans: of the same model, whose fraction stays one of the same bytes."""
        reference = self.reference
        self._forget()
        self.reference = reference

    def _programs(self, session: Session, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Program]:
        stage("tracing all graphs of the model")
        return collect(self.model, args, kwargs, session)

    @in_one_piece
    def _planned_call(self, session: Session, kind: Kind, args: Any, kwargs: Any) -> Any:
        start = CallStart(self.model, state=kind.plan not in self.compiled or not session.one_graph)
        try:
            return self._call(session, kind, args, kwargs)
        except WholeStepNeeded:
            start.restore()
            session.whole_step = False
            try:
                with contextlib.ExitStack() as stack:
                    try:
                        stack.enter_context(settled(session, lambda: self._programs(session, args, kwargs)))
                    except CaptureError as error:
                        if session.budget is not None and not session.soft:
                            raise
                        session.note(f"without a budget to be shared, each graph is planned by itself: {error}")
                        return self._call(session, kind, args, kwargs)
                    return self._call_as_foreseen(session, start, kind, args, kwargs)
            finally:
                session.whole_step = True  # another size is another step
        except LayoutNeeded as needed:
            names, groups, session.contiguous = needed.names, needed.groups, needed.contiguous
            session.movable = frozenset()
        gc.collect()  # the error held the graph, and that the weights: what is moved would leave its place taken
        lay_out(self.model, names, groups)
        return self._planned_call(session, kind, args, kwargs)

    def _find_steady(self, args: Any, kwargs: Any) -> tuple[Kind, SteadyGraph | None]:
        """The kind of a call, and the graph that it would run; None where it must go the long way.

        Gradients are looked for after the guards were asked, where there are hardly any: those read the same memory
        in less time.
        """
        likely = torch.is_grad_enabled() and self.gradients.likely()
        kind = self._kind_of(torch.is_grad_enabled(), likely and self._accumulating())
        # What is recorded for other kinds of calls is to be given back first.
        steady = self.steady.find(kind, args, kwargs, early=not kind.gradients or kind == self._kind)
        if not likely and self._accumulating():
            if steady is not None:
                steady.end()
            kind = kind._replace(accumulating=True)
            steady = self.steady.find(kind, args, kwargs, early=kind == self._kind)
        return kind, steady

    def _steady_call(self, run: Callable[..., Any], kind: Kind, args: Any, kwargs: Any) -> Any:
        """Run what was compiled for such a call; without gradients it plans anew where it folds weights anew."""
        gradients, session = kind.gradients, self.sessions[kind.plan]
        if self.last is not session:
            self.last = session
        guard = self.guards[session]
        try:
            with self._beside(session, args, kwargs), session.call(lambda: self._resident(args, kwargs, kind)):
                if guard.allowance is None:
                    outputs = run(*args, **kwargs)
                else:
                    with guard.forward(session.beyond if gradients else None):
                        outputs = run(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise MemoryError(session.short_of_memory(error)) from None
        if gradients:
            self._note(session, outputs, args, kwargs)
            guard.backward(outputs)
        return outputs

    def _kind_of(self, gradients: bool, accumulating: bool) -> Kind:
        """The kind of a call: of a step of several calls all are planned together, once it is known how many."""
        if self.options.budget is None:
            return Kind(gradients, accumulating)
        earlier = self.earlier.alive()
        if not gradients:
            if earlier:
                self._make_room(Kind(gradients, accumulating, beside=True).plan, earlier)
            return Kind(gradients, accumulating, beside=bool(earlier))
        if not earlier:
            self.together = self.earlier.most
        return Kind(gradients, accumulating, self.together)

    def _expect_calls(self, arguments: Mapping[int, int]) -> None:
        """A step turns out to have one more call than was planned for: the next ones are planned with it."""
        earlier, budget = self.earlier.alive(), self.options.budget
        self.earlier.expect(len(earlier) + 1, arguments)
        first = earlier[0].graphs[0].program if earlier else None
        if first is not None and budget is not None:
            name = type(self.model).__name__
            KnownCalls().put(name, budget.text, fingerprint(first), self.earlier.most, self.earlier.inputs)

    def _make_room(self, plan: Plan, earlier: Sequence[Ran]) -> None:
        """Plan inference anew where earlier calls of a training step hold more beside it than it was planned for."""
        known = self.sessions.get(plan)
        if known is not None and known.planned_beside < sum(ran.saved for ran in earlier):
            self._forget_plan(plan)

    @contextlib.contextmanager
    def _beside(self, session: Session, args: Any, kwargs: Any) -> Iterator[None]:
        """Within: the session knows what earlier calls of the step hold beside this one."""
        session.earlier, session.ran, session.inputs_beside = self.earlier.alive(), [], 0
        if session.earlier:
            session.inputs_beside = arguments_beside(session.earlier, arguments_of(args, kwargs))
        try:
            yield
        finally:
            session.earlier = []

    def _note(self, session: Session, outputs: Any, args: Any, kwargs: Any) -> None:
        """Remember what a call holds until its backward has run."""
        if session.ran:
            ran = Ran(tuple(session.ran), arguments_of(args, kwargs))
            self.earlier.note(ran, outputs, len(self.earlier.alive()))

    def _forget_plan(self, plan: Plan) -> None:
        """Plan calls of these kinds anew."""
        session = self.sessions.pop(plan, None)
        if session is not None:
            _release({plan: session})
            self.guards.pop(session, None)
        self.compiled.pop(plan, None)
        self.steady.forget(plan)

    def _call(self, session: Session, kind: Kind, args: Any, kwargs: Any) -> Any:
        if kind.plan not in self.compiled:
            backend = _counted(self.steady.noting(dynamo_backend(session), kind.plan), self._graphs)
            self.compiled[kind.plan] = torch.compile(self.model, backend=backend, dynamic=False)
        with dynamo_settings(session.numbers):
            return self.compiled[kind.plan](*args, **kwargs)

    def _call_as_foreseen(self, session: Session, start: CallStart, kind: Kind, args: Any, kwargs: Any) -> Any:
        session.foreseen = True
        try:
            return self._call(session, kind, args, kwargs)
        except WholeStepNeeded:  # where Dynamo gave up, it goes on; anew it gets further, as in the collection
            start.restore()
            session.foreseen = False
            del self.compiled[kind.plan]
            return self._call(session, kind, args, kwargs)
        finally:
            session.foreseen = False

    def _accumulating(self) -> bool:
        """Whether gradients exist already, so that backward adds to them: that takes a plan of its own."""
        if self.options.budget is None or not torch.is_grad_enabled():
            return False
        return self.gradients.exist()

    def _session(self, kind: Kind) -> Session:
        if kind.plan not in self.sessions:
            self.sessions[kind.plan] = Session(
                budget=self.options.budget,
                backend=self.options.engine,
                passes=self.options.passes,
                verify=self.options.verify,
                names=model_names(self.model),
                resident=Resident(),
                table=self.table,
                model_name=type(self.model).__name__,
                sizes=self.sizes,
                reference=self.reference,
                numbers=self.numbers,
                frozen="freeze" in self.options.allow,
                hooked=self.hooked if _is_alone(kind) else None,
            )
            if self.hooked.kept:
                self.sessions[kind.plan].note(KEPT)
            self.sessions[kind.plan].notes.extend(self.options.notes)
            self.sessions[kind.plan].whole_step = True
            self.sessions[kind.plan].calls, self.sessions[kind.plan].known_calls = kind.calls, self.earlier
            self.sessions[kind.plan].recordings = self._recordings_here()
            self.sessions[kind.plan].hold = functools.partial(
                _allow, weakref.ref(self), weakref.ref(self.sessions[kind.plan])
            )
            if self.options.engine.lays_out:
                self.sessions[kind.plan].movable = movable_parameters(self.model)
        return self.sessions[kind.plan]

    def _recordings_here(self) -> Pool | None:
        """Where training steps are recorded, the same for all of them; None where they cannot be."""
        if self.recordings is None and any(parameter.is_cuda for parameter in self.model.parameters()):
            self.recordings = Pool(CudaRecorder(), functools.partial(_gradients, weakref.ref(self.model)))
        return self.recordings

    def _resident(self, args: Sequence[Any], kwargs: Mapping[str, Any], kind: Kind) -> Resident:
        footprint, outside = self.optimizers.counted(), 0
        handed = self.hooked.names if _is_alone(kind) else frozenset[str]()
        stepping = self.optimizers.stepping(handed)
        resident = resident_of(
            self.model, args, kwargs, footprint, kind.accumulating, self.options.place, handed, stepping
        )
        if kind.calls > 1:  # what each of them holds is in the plan, but for the others' arguments
            outside = max(0, self.earlier.inputs - sum(arguments_of(args, kwargs).values()))
        elif kind.beside:
            earlier = self.earlier.alive()
            outside = sum(ran.saved for ran in earlier) + arguments_beside(earlier, arguments_of(args, kwargs))
        session = self.sessions.get(kind.plan)
        return dataclasses.replace(resident, outside=outside + (0 if session is None else session.outside_beside))

    def _count_optimizers(self) -> None:
        """Count what optimizers take, before torch compiles: then they step in another way."""
        self.optimizers.footprint()
        for session in self.sessions.values():
            session.note_optimizers(self.optimizers.notes)

    def _recount(self) -> None:
        """Count the optimizers by what their steps have shown; what does not keep the budget then is planned anew."""
        before = self.optimizers.counted()
        self._count_optimizers()
        footprint = self.optimizers.counted()
        if footprint == before:
            return
        # A fraction is of the same step, whose optimizers are known only now.
        self.reference.adds((footprint or NONE).state_bytes - (before or NONE).state_bytes)
        kept = [recount(session, footprint) for session in self.sessions.values()]
        if not all(kept):
            self._plan_anew()

    def _allow(self, session: Session, limit_bytes: int) -> None:
        """Make the budget the limit of the device's allocator in the steps of this session."""
        device = session.resident.device
        if device.type != "cuda":
            return
        guard = self.guards.setdefault(session, StepGuard())
        state = self.optimizers.state_bytes()
        guard.allow(allowance_of(self.model, state, session.resident, limit_bytes, guard.allowance))
        for optimizer in self.optimizers.instances():
            guard.during(optimizer)


def _counted(backend: Backend, graphs: list[int]) -> Backend:
    """The same backend, which counts the graphs that it is given in the list's first item."""

    @functools.wraps(backend)
    def counted(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs[0] += 1
        return backend(graph_module, example_inputs)

    return counted


def _release(sessions: Mapping[Plan, Session]) -> None:
    """Give back what a model's compiled functions hold between calls: Dynamo keeps them as long as the model itself."""
    for session in sessions.values():
        for function in list(session.functions):
            function.release()
        if session.recordings is not None:
            session.recordings.release()


def _is_alone(kind: Kind) -> bool:
    """Whether a call's gradients are final in its own backward: those of several calls wait for the last of these."""
    return kind.calls == 1 and not kind.beside


def _gradients(model: weakref.ref[nn.Module]) -> list[torch.Tensor]:
    here = model()
    return [] if here is None else [p.grad for p in here.parameters() if p.grad is not None]


def _allow(owner: weakref.ref[ModelCalls], session: weakref.ref[Session], limit_bytes: int) -> None:
    """Tell a compiled model, where it still lives, the budget in bytes of a step that is about to run."""
    module, known = owner(), session()
    if module is not None and known is not None:
        module._allow(known, limit_bytes)
