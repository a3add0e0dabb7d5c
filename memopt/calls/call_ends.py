"""What looks at a call as it runs, and what is told once it has returned."""

from __future__ import annotations

from typing import Any

import torch

from memopt.budget import format_bytes
from memopt.calls.guard_fast_path import Kind
from memopt.calls.residents import Residents
from memopt.calls.sessions import Sessions
from memopt.calls.several import SeveralCalls
from memopt.calls.written_twice import tell_written_around
from memopt.compilation.session import Session
from memopt.memory.reach import shown_tensors
from memopt.step.before_calls import BEFORE
from memopt.step.guard import StepGuard
from memopt.step.open_window import Watch

_RAISED = "steps may hold more than the budget by"
_WHY = "that came to lie on the device since they were planned (others' CUDA graphs, libraries, tensors not counted)"


class CallEnds:
    """The ends of one model's calls.

    Attributes:
        verifying: whether a call is run to be compared with the model's own: nothing is observed of that.
    """

    def __init__(self, sessions: Sessions, several: SeveralCalls, residents: Residents, *, budgeted: bool) -> None:
        """No call has run."""
        self._sessions, self._several, self._residents = sessions, several, residents
        self._budgeted, self.verifying = budgeted, False

    def watch(self, session: Session, kind: Kind, args: Any, kwargs: Any) -> Watch:
        """What looks at the whole step of the call that is about to run, where that is due."""
        if not kind.gradients or self.verifying or self._sessions.earlier.alive():
            return None, None
        return self._sessions.whole_steps.watch(session, kind, args, kwargs)

    def returned(self, session: Session, outputs: Any, args: Any, kwargs: Any, *, planned: bool) -> None:
        """A call has returned: what it has made is no other tensor of the process."""
        if self._budgeted and not self.verifying:
            self._residents.others.ended(session.device, outputs, planned=planned)
            if session.role.to_be_trained and not session.role.trains and not session.soft:
                BEFORE.follow(session.device, self._sessions.around, in_steps=not session.counts_all)
            elif not session.role.trains:
                BEFORE.goes_on()
            if not torch.is_grad_enabled():
                self._sessions.group.resumes(self._sessions, shown_tensors(outputs))
            if planned:
                self._residents.tell_of_others(session, args, kwargs)

    def awaits_backward(
        self, session: Session, guard: StepGuard, outputs: Any, args: Any, kwargs: Any, watch: Watch = (None, None)
    ) -> None:
        """A call with gradients has returned: what is counted, guarded and looked at until its backward."""
        outputs = shown_tensors(outputs)
        self._several.note(session, outputs, args, kwargs)
        if not self.verifying:
            self._several.let_go_unseen(session, outputs)
        guard.backward(outputs)
        raised = guard.newly_raised() if session.counts_all else 0
        if raised:
            session.unsay(_RAISED)
            session.note(f"{_RAISED} {format_bytes(raised, short=True)} {_WHY}")
        tell_written_around(session)
        if not self.verifying:
            self._sessions.ended(session, outputs, (args, kwargs), watch)
