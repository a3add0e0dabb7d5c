"""What a planned step really takes from its call until backward is over, beside what is counted for it.

A window between the call and backward sees the loop's loss. It does not see what autograd runs once backward has left
the model's graphs: the backward of what was computed before the call, as a penalty on the weights. So some steps are
looked at as a whole, and what they take beyond all that is counted is counted from the next plan on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from memopt.calls.guard_fast_path import Kind, Plan
from memopt.compilation.session import Session
from memopt.memory.attributes import held_tensors
from memopt.memory.reach import plain_tensors, shown_tensors
from memopt.memory.window import Held, Window
from memopt.step.around import Around
from memopt.step.loop_bytes import Seen, worth
from memopt.step.open_window import Watch


class WholeSteps:
    """Looks at whole steps of one model's planned calls, where the allocator tells of all that it does: on a CPU.

    A CUDA device's own counts tell of new peaks alone, and its allocator is held to the budget anyway.

    Attributes:
        seen: what steps have taken beyond what was counted for them, by what their plans go by.
    """

    def __init__(self, model: nn.Module, around: Around, tell: Callable[[Session], None]) -> None:
        """Nothing was looked at yet.

        Args:
            model: whose steps they are.
            around: what else is seen of its loop.
            tell: called with the session of a step that took more than was known.
        """
        self._model, self._around, self._tell = model, around, tell
        self._keys: weakref.WeakKeyDictionary[Session, str] = weakref.WeakKeyDictionary()  # of their latest calls
        self.seen: dict[Plan, Seen] = {}

    def watch(self, session: Session, kind: Kind, args: Any, kwargs: Any) -> Watch:
        """A call is about to run that is all of its step so far: what looks at that, where it is due."""
        key = self._keys.get(session)
        planned = session.budget is not None and not session.soft and session.report is not None
        if key is None or not planned or not kind.alone or not kind.gradients or not self._around.is_due(key):
            return None, None
        device = session.resident.device
        if device.type != "cpu":
            return None, None
        there = [*self._model.parameters(), *self._model.buffers(), *held_tensors(self._model)]
        there += [each.grad for each in self._model.parameters() if each.grad is not None]
        there += [each for each in shown_tensors((args, kwargs)) if each.device == device]
        storages = [part.untyped_storage() for tensor in there for part in plain_tensors(tensor)]
        storages += self._around.kept_outputs()
        with self._around.looking.looks():
            window = Window(device, storages)
        older, step = self._around.older_bytes(), session.step
        return window, functools.partial(_stepped, weakref.ref(self), weakref.ref(session), kind.plan, step, older)

    def ended(self, session: Session) -> None:
        """A call with gradients has returned."""
        self._keys[session] = session.ran[0].key

    def _stepped(self, session: Session, plan: Plan, older: int, held: Held) -> None:
        """A backward is over: what the allocator held beyond what there was before the call."""
        base = max(graph.base for graph in session.ran)
        counted = session.needed_around(session.ran, self._around.seen) - base
        inside, behind = held.inside + older, held.behind + older
        if held.together:  # what was there before the call and has gone by then counts in the base
            behind = min(behind, held.together - base)
        device, before = session.resident.device, self.seen.get(plan, Seen())
        found = before.joined(
            Seen(more=worth(inside - counted, device), behind=behind if worth(behind - counted, device) else 0)
        )
        if found != before:
            self.seen[plan] = found
            if found.behind:  # there eager holds the same
                session.reference.at_least(base + found.behind)
            self._tell(session)


def _stepped(
    steps: weakref.ref[WholeSteps], session: weakref.ref[Session], plan: Plan, step: Any, older: int, held: Held
) -> None:
    """A backward is over: nothing is compared where it was planned anew meanwhile, or of several calls."""
    here, known = steps(), session()
    if here is not None and known is not None and known.step is step and known.ran and not known.earlier:
        here._stepped(known, plan, older, held)


def unless_planned(planned: bool, watch: Watch) -> Watch:
    """The same, unless anything was planned in the call that it looks at: what that has left is not the loop's."""
    if planned and watch[0] is not None:
        watch[0].close()
        return None, None
    return watch
