"""CompiledModule: the model's stand-in that plans at the first call and then runs what was planned."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memopt.backends.recorder import CudaRecorder
from memopt.budget import BudgetError
from memopt.capture.export import CaptureError
from memopt.capture.shadow import model_names
from memopt.garbage import collecting_rarely
from memopt.layout import LayoutNeeded, lay_out, movable_parameters
from memopt.memory.cost.table import CostTable
from memopt.memory.gradients import Gradients
from memopt.memory.optimizer import OptimizerFootprint
from memopt.memory.resident import Resident, resident_of
from memopt.one_piece import in_one_piece
from memopt.options import Options
from memopt.program import Program
from memopt.progress import planning, stage
from memopt.recording.pool import Pool
from memopt.report.record import Report
from memopt.session import Session, WholeStepNeeded
from memopt.steady import Kind, SteadyCalls, SteadyGraph
from memopt.step.carry import Sizes
from memopt.step.guard import StepGuard, allowance_of
from memopt.step.inference import plan_inference
from memopt.step.whole import settled
from memopt.tracing import collect, dynamo_backend, dynamo_settings, note_outside

# Methods of a container that a stand-in has where its model does.
_CONTAINER = ("__len__", "__getitem__", "__iter__", "__contains__", "__reversed__")


class CompiledModule(nn.Module):
    """A model that trains and infers as before, within its budget.

    It holds the model's own parameter and buffer objects under the model's own names, so that optimizers, checkpoints
    and `state_dict` work on either. The first call with new shapes, or in a new mode, captures and plans; later calls
    run what was planned. `report` tells what was done. Hooks of the stand-in and of the model run at every call; those
    of its parts, as in `torch.compile`, are captured: of ones registered or removed after a call nothing is seen.
    """

    def __new__(cls, model: nn.Module, options: Options) -> CompiledModule:
        """A stand-in of a kind that has a length, items and so on where the model has."""
        return super().__new__(_container(type(model)))

    def __init__(self, model: nn.Module, options: Options) -> None:
        """Wrap the model; nothing is compiled yet."""
        super().__init__()
        object.__setattr__(self, "_model", model)
        for kind in ("_parameters", "_buffers", "_modules"):
            self.__dict__[kind] = getattr(model, kind)
        self.training = model.training
        self._options = options
        ceiling = None if options.budget is None else options.budget.bytes
        self._table = CostTable(ceiling_bytes=ceiling, target=options.target)
        self._footprint: OptimizerFootprint | None = None
        self._sessions: dict[bool, Session] = {}
        self._compiled: dict[bool, Callable[..., Any]] = {}
        self._guards: dict[Session, StepGuard] = {}
        self._steady = SteadyCalls(model)
        self._gradients = Gradients(model)
        self._sizes = Sizes()
        self._last: Session | None = None
        self._recordings: Pool | None = None  # of training steps
        self._kind: Kind | None = None  # of the latest call
        weakref.finalize(self, _release, self._sessions).atexit = False

    # -- the user's surface --------------------------------------------------------------------------------------

    @property
    def report(self) -> Report:
        """What the latest compilation did.

        Raises:
            RuntimeError: nothing was compiled yet.
        """
        session = self._last
        if session is None:
            raise RuntimeError("nothing is planned yet: call the model once, or pass example_inputs to memopt.compile")
        if session.report is None:
            raise RuntimeError(
                f"nothing is planned: no graph could be captured of {session.model_name}, it runs as it is"
            )
        return session.report

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model as planned; plan first where these shapes and this mode are new.

        Raises:
            BudgetError: no plan keeps the budget. Nothing was run, and nothing of the model has changed.
            CaptureError: the budget cannot be kept, as graphs depend on the values of tensors, or none can be captured.
            MemoryError: the device had less memory left than the step needs.
        """
        kind, steady = self._find_steady(args, kwargs)
        gradients, accumulating = kind
        if self._recordings is not None:
            if kind != self._kind:
                self._recordings.release()  # a call of another kind needs the memory
            self._recordings.settle()
        self._kind = kind
        if steady is not None:
            try:
                return self._steady_call(steady.run, kind, args, kwargs)
            except LayoutNeeded:  # of weights that were folded anew: the long way lays them out
                pass
            finally:
                steady.end()
        session = self._session(accumulating)
        self._last = session
        self._count_optimizer()
        guard = self._guards.setdefault(session, StepGuard())
        beyond, allowance = session.beyond if gradients else None, guard.allowance
        mark = session.outside.mark((args, kwargs) if gradients else ())
        with session.call(lambda: self._resident(args, kwargs, accumulating)):
            try:
                with guard.forward(beyond), planning(session.model_name), collecting_rarely():
                    outputs = self._planned_call(session, accumulating, args, kwargs)
            except torch.OutOfMemoryError as error:
                raise MemoryError(session.short_of_memory(error)) from None
            except BudgetError:  # what was named was tried within limits of its own
                guard.allowance = allowance
                raise
        if session.report is None and session.budget is not None and next(self._model.parameters(), None) is not None:
            raise CaptureError(f"no graph could be captured of {session.model_name}: it cannot be held to a budget")
        note_outside(session, self._model, outputs, mark)
        if gradients:
            guard.backward(outputs)
        self._steady.learn(kind, self._compiled[accumulating], args, kwargs)
        return outputs

    @in_one_piece
    def plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Report:
        """Plan for these inputs without running the model.

        Raises:
            BudgetError: no plan keeps the budget.
            CaptureError: the model's control flow depends on the values of tensors, or no graph can be captured.
        """
        accumulating = self._accumulating()
        session = self._session(accumulating)
        session.resident = self._resident(args, kwargs, accumulating)
        self._last = session
        with planning(session.model_name), session.timed("tracing"), collecting_rarely():
            programs = self._programs(session, args, kwargs)
            with torch._C._DisableAutocast():  # the casts are in the programs
                if any(program.training for program in programs):
                    session.plan_training([program for program in programs if program.training])
                else:
                    for program in dict.fromkeys(programs):
                        plan_inference(session, program)
        if session.report is None:
            raise CaptureError(f"no graph could be captured of {session.model_name}: there is nothing to plan")
        return session.report

    # -- the model's surface -------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> CompiledModule:
        """Set the model's mode."""
        self._model.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> CompiledModule:
        self._model._apply(fn, recurse)
        self._forget()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own state dict, with its own keys."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model."""
        return self._model.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("_model")
        if model is None or name.startswith("__"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(model, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        # The copy has parameters of its own, which the optimizer does not step: it is planned without it.
        options = dataclasses.replace(self._options, optimizer=None)
        return CompiledModule(copy.deepcopy(self._model, memo), options)

    def __reduce__(self) -> Any:
        return CompiledModule, (self._model, dataclasses.replace(self._options, optimizer=None))

    # -- inside --------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        _release(self._sessions)
        self._sessions.clear()
        self._compiled.clear()
        self._guards.clear()
        self._steady = SteadyCalls(self._model)
        self._sizes = Sizes()
        self._last = None
        self._footprint = None

    def _programs(self, session: Session, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Program]:
        stage("tracing the model")
        return collect(self._model, args, kwargs, session)

    @in_one_piece
    def _planned_call(self, session: Session, accumulating: bool, args: Any, kwargs: Any) -> Any:
        try:
            return self._call(session, accumulating, args, kwargs)
        except WholeStepNeeded:
            session.whole_step = False
            try:
                with contextlib.ExitStack() as stack:
                    try:
                        stack.enter_context(settled(session, lambda: self._programs(session, args, kwargs)))
                    except CaptureError as error:
                        if session.budget is not None:
                            raise
                        session.note(f"without a budget to be shared, each graph is planned by itself: {error}")
                        return self._call(session, accumulating, args, kwargs)
                    return self._call_as_foreseen(session, accumulating, args, kwargs)
            finally:
                session.whole_step = True  # another size is another step
        except LayoutNeeded as needed:
            names, groups, session.contiguous = needed.names, needed.groups, needed.contiguous
            session.movable = frozenset()
        gc.collect()  # the error held the graph, and that the weights: what is moved would leave its place taken
        lay_out(self._model, names, groups)
        return self._planned_call(session, accumulating, args, kwargs)

    def _find_steady(self, args: Any, kwargs: Any) -> tuple[Kind, SteadyGraph | None]:
        """The kind of a call, and the graph that it would run; None where it must go the long way.

        Gradients are looked for after the guards were asked, where there are hardly any: those read the same memory
        in less time.
        """
        likely = torch.is_grad_enabled() and self._gradients.likely()
        kind = Kind(torch.is_grad_enabled(), likely and self._accumulating())
        # What is recorded for other kinds of calls is to be given back first.
        steady = self._steady.find(kind, args, kwargs, early=not kind.gradients or kind == self._kind)
        if not likely and self._accumulating():
            if steady is not None:
                steady.end()
            kind = Kind(True, True)
            steady = self._steady.find(kind, args, kwargs, early=kind == self._kind)
        return kind, steady

    def _steady_call(self, run: Callable[..., Any], kind: Kind, args: Any, kwargs: Any) -> Any:
        """Run what was compiled for such a call; without gradients it plans anew where it folds weights anew."""
        gradients, accumulating = kind
        session = self._sessions[accumulating]
        if self._last is not session:  # a module looks twice at whatever is set on it
            self._last = session
        guard = self._guards[session]
        try:
            with session.call(lambda: self._resident(args, kwargs, accumulating)):
                if guard.allowance is None:
                    return run(*args, **kwargs)
                with guard.forward(session.beyond if gradients else None):
                    outputs = run(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise MemoryError(session.short_of_memory(error)) from None
        if gradients:
            guard.backward(outputs)
        return outputs

    def _call(self, session: Session, accumulating: bool, args: Any, kwargs: Any) -> Any:
        if accumulating not in self._compiled:
            backend = self._steady.noting(dynamo_backend(session), accumulating)
            self._compiled[accumulating] = torch.compile(self._model, backend=backend, dynamic=False)
        with dynamo_settings():
            return self._compiled[accumulating](*args, **kwargs)

    def _call_as_foreseen(self, session: Session, accumulating: bool, args: Any, kwargs: Any) -> Any:
        session.foreseen = True
        try:
            return self._call(session, accumulating, args, kwargs)
        except WholeStepNeeded:  # where Dynamo gave up, it goes on; anew it gets further, as in the collection
            session.foreseen = False
            del self._compiled[accumulating]
            return self._call(session, accumulating, args, kwargs)
        finally:
            session.foreseen = False

    def _accumulating(self) -> bool:
        """Whether gradients exist already, so that backward adds to them: that takes a plan of its own."""
        if self._options.budget is None or not torch.is_grad_enabled():
            return False
        return self._gradients.exist()

    def _session(self, accumulating: bool) -> Session:
        if accumulating not in self._sessions:
            self._sessions[accumulating] = Session(
                budget=self._options.budget,
                backend=self._options.engine,
                passes=self._options.passes,
                verify=self._options.verify,
                names=model_names(self._model),
                resident=Resident(),
                table=self._table,
                model_name=type(self._model).__name__,
                sizes=self._sizes,
                frozen="freeze" in self._options.allow,
            )
            self._sessions[accumulating].notes.extend(self._options.notes)
            self._sessions[accumulating].whole_step = True
            self._sessions[accumulating].recordings = self._recordings_here()
            self._sessions[accumulating].hold = functools.partial(
                _allow, weakref.ref(self), weakref.ref(self._sessions[accumulating])
            )
            if self._options.engine.lays_out:
                self._sessions[accumulating].movable = movable_parameters(self._model)
        return self._sessions[accumulating]

    def _recordings_here(self) -> Pool | None:
        """Where training steps are recorded, the same for all of them; None where they cannot be."""
        if self._recordings is None and any(parameter.is_cuda for parameter in self._model.parameters()):
            self._recordings = Pool(CudaRecorder(), functools.partial(_gradients, weakref.ref(self._model)))
        return self._recordings

    def _resident(self, args: Sequence[Any], kwargs: Mapping[str, Any], accumulating: bool) -> Resident:
        return resident_of(self._model, args, kwargs, self._count_optimizer(), accumulating, self._options.place)

    def _count_optimizer(self) -> OptimizerFootprint | None:
        """What the optimizer takes, counted once; never while torch compiles, when optimizers step in another way."""
        if self._footprint is None and self._options.optimizer is not None:
            self._footprint = self._options.footprint(list(self._model.parameters()))
        return self._footprint

    def _allow(self, session: Session, limit_bytes: int) -> None:
        """Make the budget the limit of the device's allocator in the steps of this session."""
        device = session.resident.device
        if device.type != "cuda":
            return
        guard = self._guards.setdefault(session, StepGuard())
        optimizer = self._options.optimizer
        guard.allow(allowance_of(self._model, optimizer, session.resident, limit_bytes, guard.allowance))
        guard.during(optimizer)


def _release(sessions: Mapping[bool, Session]) -> None:
    """Give back what a model's compiled functions hold between calls: Dynamo keeps them as long as the model itself."""
    for session in sessions.values():
        for function in list(session.functions):
            function.release()
        if session.recordings is not None:
            session.recordings.release()


def _gradients(model: weakref.ref[nn.Module]) -> list[torch.Tensor]:
    here = model()
    return [] if here is None else [p.grad for p in here.parameters() if p.grad is not None]


def _container(model: type[nn.Module]) -> type[CompiledModule]:
    """The kind of CompiledModule for models of a class: Python looks for these methods at classes alone."""

    def passed_on(name: str) -> Callable[..., Any]:
        return lambda self, *args: getattr(self._model, name)(*args)

    names = tuple(name for name in _CONTAINER if hasattr(model, name))
    if names not in _kinds:
        methods = {name: passed_on(name) for name in names}
        _kinds[names] = type(CompiledModule.__name__, (CompiledModule,), {"__module__": __name__, **methods})
    return _kinds[names]


_kinds: dict[tuple[str, ...], type[CompiledModule]] = {(): CompiledModule}


def _allow(owner: weakref.ref[CompiledModule], session: weakref.ref[Session], limit_bytes: int) -> None:
    """Tell a compiled model, where it still lives, the budget in bytes of a step that is about to run."""
    module, known = owner(), session()
    if module is not None and known is not None:
        module._allow(known, limit_bytes)
