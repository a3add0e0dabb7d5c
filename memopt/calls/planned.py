"""Running calls through Dynamo as they are planned, and anew where a whole step or other layouts are needed first."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memopt.budget import BudgetError
from memopt.calls.dynamo_settings import settings_of
from memopt.calls.guard_fast_path import Kind, Plan
from memopt.calls.sessions import Sessions
from memopt.calls.sizing import Symbolic
from memopt.calls.start import CallStart
from memopt.calls.tracing import collect
from memopt.capture.export import CaptureError, NotCapturedError, NotTracedError
from memopt.common.one_piece import in_one_piece
from memopt.common.progress import stage
from memopt.compilation.collection import WholeStepNeeded
from memopt.compilation.layout import LayoutNeeded, lay_out
from memopt.compilation.session import Session
from memopt.errors import first_line
from memopt.program import Program
from memopt.step.multi_graph import planned_whole
from memopt.step.sizes_apart import MadeAnewError, SizesError
from memopt.torch_compat.autograd_nodes import first_nodes
from memopt.torch_compat.fully_sharded import is_sharded, sharded_captured
from memopt.torch_compat.sharded_gradients import share_memory_with_activations


def programs_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], session: Session) -> list[Program]:
    """All graphs of one call, in order: as `memopt.calls.tracing.collect`, and said to who waits."""
    stage("tracing all graphs of the model")
    return collect(model, args, kwargs, session)


def was_planned(model: nn.Module, session: Session, outputs: Any, known: bool) -> bool:
    """Whether a graph of the call that has returned was planned; nothing is to be without a budget, or parameters.

    Args:
        model: that was called.
        session: of the call.
        outputs: what it returned.
        known: whether anything was planned in this call, or such a call was planned before.
    """
    if session.budget is None or session.soft or next(model.parameters(), None) is None:
        return True
    if not first_nodes(outputs):
        return session.report is not None and (known or not session.unplanned)
    return bool(session.ran) or (session.step is not None and known)


def set_back(before: CallStart, error: NotCapturedError) -> None:
    """Set back what a call that cannot be planned has changed so far.

    Raises:
        CaptureError: something large was written to, so that the call cannot begin anew.
    """
    changed = before.restore()
    if changed:
        raise CaptureError(f"{error}; {changed} was written to before that, so that the model itself is not called")


class PlannedCalls:
    """The calls of a model that go the long way, through `torch.compile`.

    Attributes:
        symbolic: whether sizes of the graph that has run last are symbols.
    """

    def __init__(self, model: nn.Module, sessions: Sessions) -> None:
        """Of a model with these compilations."""
        self._model, self._sessions = model, sessions
        self._written: dict[Plan, set[int]] = {}  # memory of the model that calls have written to
        self.symbolic = False

    def before(self, session: Session, kind: Kind) -> dict[str, Any]:
        """Of what a call may change, what has to be kept: as `Fallback.before` takes it."""
        return {"anew": session.broken or not session.one_graph, "written": self._written.get(kind.plan)}

    def captures(self, session: Session, args: Any, kwargs: Any) -> bool:
        """Whether any graph of such a call can be captured; where fake tensors fail, the call itself tells."""
        with contextlib.suppress(Exception):
            return bool(programs_of(self._model, args, kwargs, session))
        return True

    @in_one_piece
    def run(self, session: Session, kind: Kind, before: CallStart | None, args: Any, kwargs: Any) -> Any:
        """Run a call of the model.

        Args:
            session: of the call.
            kind: of the call.
            before: what there is; None: find out.
            args, kwargs: of the call.

        Raises:
            BudgetError: no plan keeps the budget. Nothing was run.
            CaptureError: the budget is to be shared by graphs that cannot be seen without running them,
                or the call has to begin anew and has written to large tensors.
        """
        symbols = self._sessions.sizing.of(kind, session, args, kwargs)
        made = self._sessions.has_function(kind, symbolic=symbols is not None)
        state = not made or session.broken or not session.one_graph
        start = before
        if start is None or (state and not start.state):
            start = CallStart(
                self._model, (args, kwargs), state=state, written=self._written.get(kind.plan) if made else None
            )
        while True:
            try:
                outputs = self._run(session, start, kind, symbols, args, kwargs)
                if not (kind.gradients and session.fallbacks.lacks(session, outputs)):
                    if state and not made:
                        self._written.setdefault(kind.plan, set()).update(start.written())
                    return outputs
                self._begin_anew(start)
                self._sessions.lower_anew(kind.plan)
                continue
            except BudgetError as error:
                session.fallbacks.plan_for_less(session, error)
            except MadeAnewError:
                self._sessions.forget_symbolic(kind)
            except NotTracedError:
                if not session.numbers.make_constant():
                    raise
            start.restore()

    def _run(
        self, session: Session, start: CallStart, kind: Kind, symbols: Symbolic | None, args: Any, kwargs: Any
    ) -> Any:
        self.symbolic = symbols is not None
        if symbols is None:
            return self._run_at_size(session, start, kind, args, kwargs)
        graphs, made = self._sessions.graphs, self._sessions.has_function(kind, symbolic=True)
        try:
            with sharded_captured(self._model), settings_of(session, symbolic=True, varying=symbols.varying):
                return self._sessions.function(kind, symbolic=True)(*args, **kwargs)
        except MadeAnewError:
            raise
        except (SizesError, WholeStepNeeded) as error:
            others, failed = isinstance(error, SizesError) and error.others, False
            reason = str(error) or "a step of several graphs is planned together"
        except (BudgetError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of code that was there it is the model's own; else that may be asked, and is
            if symbols.varying is None or (made and self._sessions.graphs == graphs):
                raise
            reason, others, failed = f"with symbolic sizes there is an error: {first_line(error)}", False, True
        self._begin_anew(start)
        self.symbolic = False
        if not failed:
            self._sessions.outgrown(kind, symbols, reason, others=others)
            return self._run_at_size(session, start, kind, args, kwargs)
        outputs = self._run_at_size(session, start, kind, args, kwargs)
        self._sessions.outgrown(kind, symbols, reason, others=others)
        return outputs

    def _run_at_size(self, session: Session, start: CallStart, kind: Kind, args: Any, kwargs: Any) -> Any:
        try:
            if session.step is None and is_sharded(self._model):  # no rank begins what another one may refuse
                if session.budget is not None and next(self._model.parameters()).is_cuda:
                    share_memory_with_activations(self._model)
                session.see_whole_step()
            return self._call(session, kind, args, kwargs)
        except WholeStepNeeded:
            self._begin_anew(start)
            with session.collection.done(), contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(planned_whole(session, lambda: programs_of(self._model, args, kwargs, session)))
                except CaptureError as error:
                    if session.budget is not None and not session.soft:
                        raise
                    session.note(f"without a budget to be shared, each graph is planned by itself: {error}")
                    return self._call(session, kind, args, kwargs)
                if is_sharded(self._model):
                    self._sessions.agreement.reach()
                return self._call_as_foreseen(session, start, kind, args, kwargs)
        except LayoutNeeded as needed:
            session.layout.changes(needed)
            names, groups = needed.names, needed.groups
        gc.collect()  # the error held the graph, and that the weights: what is moved would leave its place taken
        lay_out(self._model, names, groups)
        return self.run(session, kind, None, args, kwargs)

    def _call(self, session: Session, kind: Kind, args: Any, kwargs: Any) -> Any:
        function = self._sessions.function(kind)
        with sharded_captured(self._model), settings_of(session):
            return function(*args, **kwargs)

    def _call_as_foreseen(self, session: Session, start: CallStart, kind: Kind, args: Any, kwargs: Any) -> Any:
        try:
            with session.collection.all_known():
                return self._call(session, kind, args, kwargs)
        except WholeStepNeeded:  # where Dynamo gave up, it goes on; anew it gets further, as in the collection
            self._begin_anew(start)
            del self._sessions.compiled[kind.plan]
            return self._call(session, kind, args, kwargs)

    def _begin_anew(self, start: CallStart) -> None:
        """Set back what the part of a call that has run has changed."""
        changed = start.restore()
        if changed:
            raise CaptureError(
                f"{changed} of {type(self._model).__name__} was written to before all graphs of the call were known, "
                "and is not copied each time: write to it after the model was called, or to a copy"
            )
