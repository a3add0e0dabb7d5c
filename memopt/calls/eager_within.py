"""Calls of a model that cannot be captured: they run eagerly within a budget that their counted step keeps."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from memopt.budget import BudgetError, format_bytes
from memopt.calls.eager_count import eager_count, state_now
from memopt.calls.eager_levers import EagerLevers, Way, bytes_beside
from memopt.calls.guard_fast_path import Kind
from memopt.capture.eager_call import EagerCall
from memopt.capture.export import NotCapturedError
from memopt.compilation.session import Session
from memopt.memory.attributes import held_tensors
from memopt.memory.distributed import is_replica
from memopt.memory.reach import plain_tensors
from memopt.memory.resident import storage_bytes
from memopt.memory.window import Held, Window, closed_if_it_fails
from memopt.options import Options
from memopt.report.eager import eager_report
from memopt.step.around import Around
from memopt.step.earlier_calls import EAGER, Figures
from memopt.step.graph_peaks import between_graphs, step_peak
from memopt.step.loop_bytes import SCALARS
from memopt.step.module_checkpoints import ModuleCheckpoints
from memopt.step.open_window import Watch
from memopt.step.other_tensors import others_in_words
from memopt.torch_compat.saved_tensors import hooks_in_force

log = logging.getLogger("memopt")

RUNS = "runs eagerly: "
RECOMPUTES = "recomputed in backward, as by torch.utils.checkpoint: "
_WAY = "leave the budget out"

_MOST = 256  # kinds of calls that are remembered


@dataclasses.dataclass
class _Known:
    """A kind of call that was counted.

    Attributes:
        eager: what it takes, as was seen on fake tensors.
        state: of the model and of torch's settings then: in another state it may take something else.
        reason: why there is no plan.
        levers: the ways to run it.
        way: the one that is taken.
        checkpoints: the modules that are recomputed so.
        more: bytes that a real step took beyond what was counted.
        real: bytes that a real step took, all that is resident included; None before one was seen.
        looks: how often a real step may yet be looked at for that.
        refused: whether there was a plan, which was over the budget.
    """

    eager: EagerCall
    state: Any
    reason: str
    levers: EagerLevers
    way: Way
    checkpoints: ModuleCheckpoints
    more: int = 0
    real: int | None = None
    looks: int = 3
    refused: bool = False

    def goes(self, way: Way) -> None:
        """Run such calls so from now on."""
        if way.calls != self.way.calls:
            self.checkpoints = ModuleCheckpoints(way.calls)
            self.real, self.more, self.looks = None, 0, max(1, self.looks)
        self.way = way


@dataclasses.dataclass(frozen=True)
class _Needs:
    """Bytes on the device.

    Attributes:
        base: that are there anyway, with the tensors that the model holds beside its parameters and buffers.
        call: the most in a call as it is, beside the other calls of its step, with all that is resident.
        most: the most in the step, the optimizer's included.
    """

    base: int
    call: int
    most: int


def why_not(session: Session, error: NotCapturedError | BudgetError) -> NotCapturedError | BudgetError:
    """Why there is no plan, without the frames that hold the call's tensors.

    Raises:
        BudgetError: the same, where the call as it is cannot take less: where one graph is all that there is, and no
            gradients of the loop's own wait for the model's, which a graph gives all at once. All of eager's own peak
            is what eager takes, whatever code of ours does.
    """
    whole = session.budget is not None and (session.budget.fraction or 0) >= 1
    several = session.outside_bytes or session.broken
    if isinstance(error, BudgetError) and not (several or session.seen.held or whole):
        raise error
    return copy.copy(error)


class EagerWithinLimit:
    """The calls of one model that cannot be captured, each counted on fake tensors before it runs."""

    def __init__(self, model: nn.Module, options: Options, around: Around) -> None:
        """None is known yet; `around` is what its loop is seen to hold."""
        self._model, self._options, self._around = model, options, around
        self._known: dict[Any, _Known] = {}
        self._decides: Any = None  # the kind of call that a fraction is of
        self._accumulated = False  # whether gradients were there in a call already
        self._said: set[str] = set()  # reasons
        self._limits: weakref.WeakKeyDictionary[Session, int] = weakref.WeakKeyDictionary()  # in force, in bytes

    def admits(self, called: Any, session: Session, kind: Kind, args: Any, kwargs: Any) -> bool:
        """Whether a call is one that is known to run eagerly, and keeps the budget now, too; else it is captured anew.

        Args:
            called: the kind of the call, by its inputs.
            session: of such calls, which knows the earlier ones of the step.
            kind: of the call.
            args, kwargs: of the call.

        Raises:
            BudgetError: its count is over the budget.
        """
        known = self._known.get(called)
        if known is None or session.budget is None:
            return False
        state = state_now(self._model, session)
        if known.eager.by_values or hooks_in_force() or known.state != state:
            eager = eager_count(self._model, session, kind, args, kwargs)
            if isinstance(eager, str):
                del self._known[called]
                return False
            known.eager, known.state = eager, state
            known.levers = EagerLevers(eager, max(1, kind.calls), known.way)
        self._admit(called, session, kind, known, args, kwargs)
        return True

    def admit(
        self, called: Any, session: Session, kind: Kind, args: Any, kwargs: Any, error: NotCapturedError | BudgetError
    ) -> None:
        """Let a call that is not captured, or whose plan is over the budget, run eagerly; arguments as of `admits`.

        Args:
            error: why there is no plan.

        Raises:
            BudgetError: its count is over the budget; of two refusals the one with the lower minimum.
            NotCapturedError: what it takes cannot be counted, or passes of the user's own are for plans.
        """
        asked = self._options.target is not None or self._options.passes is not None
        if session.budget is None or session.soft or asked:
            raise error
        eager = eager_count(self._model, session, kind, args, kwargs)
        if isinstance(eager, str):
            if isinstance(error, BudgetError):
                raise error
            way = "" if _WAY in str(error) else f": {_WAY}"
            if is_replica(self._model):  # torch traces no module of its own, as Sequential, right within it
                way = f": compile the model within it, DistributedDataParallel(memopt.compile(model, …)), or {_WAY}"
            raise NotCapturedError(f"{error}; what it takes eagerly cannot be counted, as {eager}{way}")
        reason = str(error)
        if isinstance(error, BudgetError):
            why = error.beside or "it is several graphs"
            reason = f"one takes at least {format_bytes(error.minimum_bytes, short=True)}, as {why}"
        levers = EagerLevers(eager, max(1, kind.calls))
        known = _Known(eager, state_now(self._model, session), reason, levers, levers.plain, ModuleCheckpoints(()))
        known.refused = isinstance(error, BudgetError)
        try:
            self._admit(called, session, kind, known, args, kwargs)
        except BudgetError as own:
            if isinstance(error, BudgetError) and own.minimum_bytes >= error.minimum_bytes:
                raise error from None
            self._remember(called, known)
            raise
        self._remember(called, known)

    @property
    def not_captured(self) -> bool:
        """Whether no graph could be captured of some call."""
        return any(not known.refused for known in self._known.values())

    def _remember(self, called: Any, known: _Known) -> None:
        if len(self._known) < _MOST:
            self._known[called] = known

    def _admit(self, called: Any, session: Session, kind: Kind, known: _Known, args: Any, kwargs: Any) -> None:
        """Have the limit in force for a call that keeps it, by the way that does, and say so.

        Raises:
            BudgetError: none does.
        """
        plain = self._needs(session, kind, known, known.levers.plain)
        limit = self._limit(called, session, kind, plain)
        way, least = self._way(session, kind, known, limit, args, kwargs)
        if way is None and kind.calls > 1 and not session.earlier:  # this step may be one of a single call
            kind = kind._replace(calls=1)
            way, least = self._way(session, kind, known, limit, args, kwargs)
        if way is None:
            needs = self._needs(session, kind, known, least)
            peak, most = format_bytes(plain.call - plain.base, short=True), session.minimum_budget(needs.most)
            others = others_in_words(session.resident.others)
            beside = f"{others + '; ' if others else ''}{known.reason}; eagerly a call takes {peak}"
            if least.calls:
                lower = format_bytes(needs.call - needs.base, short=True)
                beside += f", and {lower} with {least} recomputed in backward"
            helps = "smaller modules" if least.calls else "torch.utils.checkpoint around parts of it"
            raise BudgetError(most, limit, beside=f"{beside}, which {helps} or a capture without that place may lower")
        known.goes(way)
        needs = self._needs(session, kind, known, way)
        size, of = (format_bytes(number, short=True) for number in (needs.most, limit))
        line = f"{RUNS}{size} were counted, of a budget of {of}; no plan was made: {known.reason}"
        if line not in session.notes:
            session.unsay(RUNS, RECOMPUTES)
            session.note(line)
            if way.calls:
                less = format_bytes(plain.most - needs.most, short=True)
                session.note(f"{RECOMPUTES}{way}; the step takes {less} less")
        if known.reason not in self._said:
            self._said.add(known.reason)
            log.warning("memopt: %s %s", session.model_name, line)
        peaks = way.eager.peaks
        gradients = sum(size for _, size in peaks.gradients)
        report = eager_report(session, needs.most, limit, gradients, known.real, plain.most)
        graph = Figures(peaks, known.eager.peaks, needs.base, EAGER, None) if kind.gradients else None
        session.runs_eagerly(report, graph)
        if self._limits.get(session) != limit:
            session.hold(limit)
            self._limits[session] = limit

    def _way(
        self, session: Session, kind: Kind, known: _Known, limit: int, args: Any, kwargs: Any
    ) -> tuple[Way | None, Way]:
        """The way of such a call that keeps a limit, None for none; and the one that takes least."""
        room = session.usable(limit)

        def needs(way: Way) -> int:
            return self._needs(session, kind, known, way).most

        def count(around: Callable[[nn.Module], Any]) -> EagerCall | None:
            found = eager_count(self._model, session, kind, args, kwargs, around, bool(known.eager.made))
            return None if isinstance(found, str) else found

        if kind.gradients:
            return known.levers.find(needs, room, count)
        plain = known.levers.plain
        return plain if needs(plain) <= room else None, plain

    def _limit(self, called: Any, session: Session, kind: Kind, needs: _Needs) -> int:
        """The budget in bytes; a fraction is of the first step, or of one of more calls than it was thought to have."""
        assert session.budget is not None
        if kind.gradients:
            if session.reference.training is None:
                self._decides = called
            session.reference.trains(needs.most, object(), max(kind.calls, len(session.earlier) + 1))
            if kind.accumulating and not self._accumulated:
                self._accumulated = True  # steps have a backward that adds to gradients, as eager's have
                before = session.reference.training or 0
                trained = sum(each.nbytes for each in self._model.parameters() if each.requires_grad)
                session.reference.supposes(min(needs.most, before + trained))
        elif not session.waits_for_training(needs.call):
            session.reference.infers(needs.call)
        return session.budget.resolve(session.reference.of(needs.call))

    def _needs(self, session: Session, kind: Kind, known: _Known, way: Way) -> _Needs:
        peaks, resident, seen = way.eager.peaks, session.resident, session.seen
        # As the next call finds them.
        held = max(way.eager.kept, storage_bytes(list(held_tensors(self._model)), resident.device))
        base = resident.total - resident.outside - resident.attributes + held - way.eager.made
        if not kind.gradients:
            beside = resident.outside - session.outside_beside
            call = base + beside + peaks.forward
        else:
            earlier = [graph.peaks for ran in session.earlier for graph in ran.graphs]
            coming = max(1, kind.calls - len(session.earlier))
            others = (
                resident.outside - session.outside_beside - seen.beside if kind.calls > 1 else session.inputs_beside
            )
            between, kept = seen.between, seen.held
            if known.refused and not seen.known:  # the caller's loss takes what the plan has counted for it
                between, kept = session.allowance.tangents.loss, session.allowance.tangents.early
            with between_graphs(between, seen.forward):
                call = base + kept + max(0, others) + step_peak([*earlier, *[peaks] * coming])
        call += known.more + bytes_beside(way, resident.device)
        return _Needs(base, call, max(call, session.optimizer_peak() + held - resident.attributes))

    # -- the real step beside the count -------------------------------------------------------------------------------

    def run(
        self, called: Any, session: Session, kind: Kind, args: Any, kwargs: Any, *, look: bool
    ) -> tuple[Any, Watch]:
        """Run the model; the first time, look at what the call takes of the allocator.

        Returns:
            Its outputs, and what has begun to look at a step; what a step of several calls takes is not compared.
        """
        known = self._known.get(called)
        if known is None:
            return self._model(*args, **kwargs), (None, None)
        with known.checkpoints.applied(self._model):
            return self._run(known, called, session, kind, args, kwargs, look=look)

    def _run(
        self, known: _Known, called: Any, session: Session, kind: Kind, args: Any, kwargs: Any, *, look: bool
    ) -> tuple[Any, Watch]:
        if not look or not known.looks or session.earlier or kind.calls > 1:
            return self._model(*args, **kwargs), (None, None)
        known.looks -= 1
        gradients = [each.grad for each in self._model.parameters() if each.grad is not None]  # loops let go of them
        parts = (part for tensor in (*held_tensors(self._model), *gradients) for part in plain_tensors(tensor))
        there = [part.untyped_storage() for part in parts] + self._around.kept_outputs()
        window, older = Window(session.resident.device, there), self._around.older_bytes()
        del gradients, parts, there
        with closed_if_it_fails(window):
            outputs = self._model(*args, **kwargs)
        if kind.gradients:
            return outputs, (window, functools.partial(self._stepped, called, weakref.ref(session), kind, older))
        held = window.close()
        if held is not None:
            self._compare(called, session, kind, held.peak, known.way.eager.peaks.forward)
        return outputs, (None, None)

    def _stepped(self, called: Any, here: weakref.ref[Session], kind: Kind, older: int, held: Held) -> None:
        """A backward is over: what the allocator held beyond what there was before the call, older outputs included."""
        session, known = here(), self._known.get(called)
        if session is None or known is None or known.real is not None:  # said by an earlier step
            return
        took = 0 if held.whole is None else held.whole + older
        with between_graphs(session.seen.between, session.seen.forward):
            counted = step_peak([known.way.eager.peaks]) + session.seen.held
        if self._decides == called and took - counted > SCALARS:  # a fraction is of what the step really takes
            session.reference.takes_more(took - counted)
        self._compare(called, session, kind, took, counted)

    def _compare(self, called: Any, session: Session, kind: Kind, took: int, counted: int) -> None:
        """Say what a real call took beyond what was counted for it, and count it from now on."""
        known = self._known[called]
        needs, more = self._needs(session, kind, known, known.way), max(0, took - counted)
        known.looks = 0
        if not more and session.resident.device.type == "cuda":
            return  # there a peak that is no new one is not known
        known.real = needs.call + took - counted
        session.took(known.real)
        if more <= SCALARS:
            return
        known.more = more
        size, real = format_bytes(more, short=True), format_bytes(known.real, short=True)
        line = f"eagerly a step took {real}, {size} more than was counted before it, which is counted from now on"
        limit = self._limit(called, session, kind, self._needs(session, kind, known, known.levers.plain))
        if known.real > session.usable(limit):
            line += f"; that was over the budget of {format_bytes(limit, short=True)}, and such calls are refused now"
        session.note(line)
        log.warning("memopt: %s: %s", session.model_name, line)
