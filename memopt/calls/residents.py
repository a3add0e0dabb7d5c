"""What the device holds anyway in the calls of one model: parameters, inputs, optimizers, earlier calls of the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from memopt.calls.guard_fast_path import Kind
from memopt.calls.refusals import refuse_hopeless
from memopt.calls.sessions import Sessions
from memopt.memory.optimizers import NONE
from memopt.memory.resident import Resident, resident_of
from memopt.options import Options
from memopt.step.account import Account
from memopt.step.earlier_calls import arguments_beside, arguments_of
from memopt.step.optimizers import Optimizers
from memopt.step.recount import recount


class Residents:
    """What is resident in the calls of one model, by kind of call."""

    def __init__(self, model: nn.Module, options: Options, optimizers: Optimizers, sessions: Sessions) -> None:
        """Of a model with these optimizers and these compilations; options: where it runs, and its budget."""
        self._model, self._options = model, options
        self._optimizers, self._sessions = optimizers, sessions

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any], kind: Kind) -> Resident:
        """What the device holds in a call of this kind with these arguments, optimizers as they were counted last."""
        footprint, outside = self._optimizers.counted(), 0
        handed = self._sessions.hooked.names if kind.alone else frozenset[str]()
        stepping = self._optimizers.stepping(handed)
        resident = resident_of(
            self._model, args, kwargs, footprint, kind.accumulating, self._options.place, handed, stepping
        )
        if kind.calls > 1:  # what each of them holds is in the plan, but for the others' arguments
            outside = max(0, self._sessions.earlier.inputs - sum(arguments_of(args, kwargs).values()))
        elif kind.beside:
            earlier = self._sessions.earlier.alive()
            outside = sum(ran.saved for ran in earlier) + arguments_beside(earlier, arguments_of(args, kwargs))
        session = self._sessions.get(kind.plan)
        if session is not None:
            outside += session.outside_beside + session.seen.held
        return dataclasses.replace(resident, outside=outside)

    def count_optimizers(self) -> None:
        """Count what optimizers take, before torch compiles: then they step in another way."""
        self._optimizers.footprint()
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
        kept = [recount(session, footprint) for session in self._sessions.values()]
        if not all(kept):
            self._sessions.forget_all()

    def refuse_hopeless(self, resident: Resident) -> None:
        """Refuse a budget that does not hold what is there anyway in a call.

        Raises:
            BudgetError: no plan goes below that.
        """
        refuse_hopeless(Account(self._options.budget, dataclasses.replace(resident, outside=0)), self._model)
