"""What the device holds anyway in the calls of one model: parameters, inputs, optimizers, earlier calls of the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memopt.budget import BudgetError
from memopt.calls.group import Group
from memopt.calls.guard_fast_path import Kind
from memopt.calls.refusals import is_large, refuse_hopeless
from memopt.calls.sessions import Sessions
from memopt.compilation.session import Session
from memopt.memory.allocator_events import is_profiled
from memopt.memory.attributes import held_tensors
from memopt.memory.distributed import has_group
from memopt.memory.optimizers import NONE
from memopt.memory.reach import held_tensors as tensors_behind
from memopt.memory.reach import plain_tensors, shown_tensors
from memopt.memory.resident import Resident, resident_of, storage_bytes
from memopt.options import Options
from memopt.step.before_calls import BEFORE
from memopt.step.earlier_calls import arguments_beside, arguments_of
from memopt.step.memory_ledger import MemoryLedger
from memopt.step.optimizers import Optimizers
from memopt.step.other_tensors import LITTLE, others_in_words
from memopt.step.recount import recount
from memopt.torch_compat.storages import id_of_storage

# Nothing is said of other tensors that take less than step / _SMALL.
_SMALL = 64
_LATER = (
    "a profiler is active: optimizers and other tensors that take more than was planned for may be over the budget "
    "until it has ended, when the step is planned anew"
)


class Residents:
    """What is resident in the calls of one model, by kind of call.

    Attributes:
        others: tensors of the process beside the model's steps.
    """

    def __init__(
        self, model: nn.Module, options: Options, optimizers: Optimizers, sessions: Sessions, group: Group
    ) -> None:
        """Of a model with these optimizers, compilations and group; options: where it runs, and its budget."""
        self._model, self._options = model, options
        self._optimizers, self._sessions = optimizers, sessions
        self._group, self.others = group, group.others
        self._attributes = 0  # bytes of tensors that the model holds beside parameters and buffers, as counted last
        self._over = False  # whether plans do not keep the budget with what is counted
        self._differentiated = 0  # bytes of parameters that had gradients, at most

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any], kind: Kind) -> Resident:
        """What the device holds in a call of this kind with these arguments, optimizers as they were counted last."""
        footprint, outside = self._optimizers.counted(), 0
        handed = self._sessions.hooked.names if kind.alone else frozenset[str]()
        stepping, session = self._optimizers.stepping(handed), self._sessions.get(kind.plan)
        added = session.early.added if session is not None and session.early is not None else frozenset[str]()
        resident = resident_of(
            self._model,
            args,
            kwargs,
            footprint,
            kind.accumulating,
            self._options.place,
            handed,
            stepping,
            added,
            self._held(args, kwargs),
        )
        if kind.gradients:
            self._trains(resident.differentiated)
        if kind.calls > 1:  # what each of them holds is in the plan, but for the others' arguments
            outside = max(0, self._sessions.earlier.inputs - sum(arguments_of(args, kwargs).values()))
        elif kind.beside:
            earlier = self._sessions.earlier.alive()
            outside = sum(ran.saved for ran in earlier) + arguments_beside(earlier, arguments_of(args, kwargs))
            known = 0 if session is None else session.seen.held
            outside += 0 if kind.gradients else max(0, self._sessions.around.left - known)
        if session is not None:
            outside += session.outside_beside + session.seen.beside
        alive = self._group.alive(self._sessions)
        if alive:
            outside += sum(ran.saved for ran in alive) + arguments_beside(alive, arguments_of(args, kwargs))
        others, coming, footprint = self._group.beside(self._model, footprint)
        if alive and not kind.gradients:  # a loop may zero theirs after this call, and in the first step there are none
            others, coming = others + coming, 0
        others += self._counted(self._beside(args, kwargs))
        return dataclasses.replace(resident, outside=outside, others=others, coming_beside=coming, optimizer=footprint)

    def _trains(self, size: int) -> None:
        """A call with gradients comes, of so many bytes of parameters."""
        before, self._differentiated = self._differentiated, max(self._differentiated, size)
        if 0 < before < size:
            self._sessions.reference.trains_more()

    def count_optimizers(self) -> None:
        """Count what optimizers take, before torch compiles: then they step in another way."""
        self._optimizers.footprint()
        self._group.recount()
        for session in self._sessions.values():
            session.note_optimizers(self._optimizers.notes)

    def recount(self) -> None:
        """Count the optimizers by what their steps have shown; what does not keep the budget then is planned anew."""
        before = self._optimizers.counted()
        self.count_optimizers()
        footprint = self._optimizers.counted()
        if footprint == before:
            return
        # A fraction is of the same step, whose optimizers are known only now.
        self._sessions.reference.adds((footprint or NONE).state_bytes - (before or NONE).state_bytes)
        self._judge()

    def _judge(self) -> None:
        others, _, footprint = self._group.beside(self._model, self._optimizers.counted())
        others += self._counted(self.others.total)
        kept = [recount(session, footprint, others, self._attributes) for session in self._sessions.values()]
        self._over |= not all(kept)
        self.plan_anew()
        for session in self._sessions.values() if self._over else ():
            session.note(_LATER)

    def plan_anew(self) -> None:
        """Drop plans that do not keep the budget with what is counted by now.

        Beside a profiler nothing can be measured, and so nothing planned: they are dropped when it has ended.
        """
        if self._over and not is_profiled():
            self._over = False
            self._sessions.forget_all()

    def look_around(self, args: Any, kwargs: Any) -> None:
        """Count the other tensors of the process; what does not keep the budget then is planned anew.

        Where processes work together nothing is looked at: all of them plan the same.

        Args:
            args, kwargs: of the call that is about to run.
        """
        if self._options.budget is None or self._options.target is not None or has_group():
            return
        device = next((each.device for each in (*self._model.parameters(), *self._model.buffers())), None)
        if device is None:
            device = next((leaf.device for leaf in shown_tensors((args, kwargs))), torch.device("cpu"))
        around = self._sessions.around
        known, outputs = self._known(args, kwargs), around.kept_outputs()
        before = self._counted(self.others.total)
        self.others.look(device, known, outputs, loop_holds=bool(around.seen.held))
        held, self._attributes = self._attributes, self._held(args, kwargs)
        added = self._counted(self.others.total) - before + self._attributes - held
        if added and not self._counts and self.others.is_new:  # eager holds the same
            self._sessions.reference.adds(added)
        if added:
            self._judge()

    def tell_of_others(self, session: Session, args: Any, kwargs: Any) -> None:
        """Say what other tensors there are where a fraction does not count them: it is one of the step's own peak.

        Args:
            session: of the call that has run.
            args, kwargs: of that call.
        """
        report = session.report
        if self.others.growing and self._counts:
            session.note(
                f"{others_in_words(self.others.total)} with what is left to them, as they grow from step to step"
            )
        beside = self._beside(args, kwargs)
        others = beside - self._counted(beside)
        if report is not None and others * _SMALL > report.unconstrained_bytes:
            session.note(f"{others_in_words(others)} beside the step, of whose own peak a fraction is")

    def in_bytes(self, error: BudgetError, args: Any, kwargs: Any) -> BudgetError:
        """A refusal whose minimum is true of a budget in bytes: of one that was a fraction it leaves others out.

        Args:
            error: the refusal.
            args, kwargs: of the call that was refused.
        """
        beside = self._beside(args, kwargs) if error.minimum_bytes else 0
        others = beside - self._counted(beside)
        # A little more may be there when that budget is tried: losses come and go.
        found = error if others <= LITTLE else error.with_others(others + LITTLE, others_in_words(others))
        return found if not error.minimum_bytes else found.not_below(BEFORE.unsure(self._sessions.around))

    @property
    def _counts(self) -> bool:
        """Whether the budget is of all that the process holds: an absolute one."""
        return self._options.budget is not None and self._options.budget.bytes is not None

    def _counted(self, beside: int) -> int:
        """Of bytes of other tensors, those that the budget is of: of a fraction, what graphs of the same step hold."""
        return beside if self._counts else min(beside, self.others.of_step)

    def _beside(self, args: Any, kwargs: Any) -> int:
        """Bytes of others that the arguments do not hold: a batch may be a view of a data set that counted before."""
        return max(0, self.others.total - self.others.of_these(shown_tensors((args, kwargs))))

    def _held(self, args: Any, kwargs: Any) -> int:
        """Bytes that the model holds beside parameters, buffers and arguments: what calls have returned is apart."""
        kept, device = set(map(id_of_storage, self._sessions.around.kept_outputs())), self._options.place
        held = [part for tensor in held_tensors(self._model) for part in plain_tensors(tensor)]
        held = [part for part in held if id_of_storage(part.untyped_storage()) not in kept]
        if not held:
            return 0
        own = [*self._model.parameters(), *self._model.buffers(), *shown_tensors((args, kwargs))]
        own += [each.grad for each in self._model.parameters() if each.grad is not None]
        home = device or next((each.device for each in own), held[0].device)
        held = [part for part in held if device is not None or part.device == home]
        return storage_bytes([*own, *held], device) - storage_bytes(own, device)

    def _known(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Tensors that are counted otherwise."""
        parameters, buffers = list(self._model.parameters()), list(self._model.buffers())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        stepping = [*self._optimizers.instances(), *self._group.optimizers()]
        # Their state is by parameter: of those that are not the model's own, or not now, nothing else counts.
        steps = [tensor for item in stepping for tensor in tensors_behind(item) if type(tensor) is not nn.Parameter]
        given = shown_tensors((args, kwargs))
        own = [*parameters, *buffers, *gradients, *held_tensors(self._model)]
        return [*own, *self._group.tensors(self._model), *steps, *given]

    def refuse_at_once(self, args: Sequence[Any], kwargs: Mapping[str, Any], kind: Kind) -> None:
        """Refuse a budget that what stays exceeds, before optimizers are counted: that takes a second or more.

        Of optimizers that were not counted yet the least counts.

        Raises:
            BudgetError: no plan goes below that.
        """
        budget = self._options.budget
        if budget is None or budget.bytes is None or not is_large(self._model):
            return
        resident = dataclasses.replace(self.of(args, kwargs, kind), outside=0)
        trains = kind.gradients and bool(self._optimizers.given)
        if resident.optimizer is None and trains:
            refuse_hopeless(MemoryLedger(budget, resident), resident.trainable)
            resident = dataclasses.replace(resident, optimizer=self._optimizers.minimum())
        refuse_hopeless(MemoryLedger(budget, resident))

    def refuse_hopeless(self, resident: Resident) -> None:
        """Refuse a budget that does not hold what is there anyway in a call.

        Raises:
            BudgetError: no plan goes below that.
        """
        if is_large(self._model):
            refuse_hopeless(MemoryLedger(self._options.budget, dataclasses.replace(resident, outside=0)))
