"""The calls of a step before its backward: what they hold for each other, and how many are planned together."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memopt.budget import Budget, BudgetError
from memopt.calls.guard_fast_path import Kind, Plan
from memopt.calls.sessions import Sessions
from memopt.compilation.session import Session
from memopt.memory.reach import storages_of
from memopt.step.earlier_calls import (
    EarlierCalls,
    Figures,
    KnownCalls,
    Ran,
    arguments_beside,
    arguments_of,
    without_made,
)
from memopt.step.loop_bytes import SCALARS
from memopt.torch_compat import pytree
from memopt.torch_compat.saved_tensors import hooks_in_force

HOOKED = (
    "what is saved for backward passes through hooks around the model (torch.utils.checkpoint's, save_on_cpu's): "
    "what they keep beyond the call is not counted"
)


class SeveralCalls:
    """How many calls of a model there are in a step, as far as is known, and what the earlier ones hold."""

    def __init__(self, model: nn.Module, budget: Budget | None, sessions: Sessions) -> None:
        """Nothing was called yet.

        Args:
            model: that is called.
            budget: of its steps.
            sessions: its compilations, which know the calls of the present step.
        """
        self._name, self._budget, self._sessions = type(model).__name__, budget, sessions
        self._together = 1  # calls of the present step that are planned together
        self._calls = 0  # of it so far
        # Where models share a budget, one may be called for its own loss and for another's, in turn.
        self._turn: tuple[int, int] = (0, 0)
        self._turns: dict[tuple[int, int], int] = {}
        # As calls were planned: bytes that earlier ones hold beside them, and that the loop has made behind those.
        self._planned: dict[Plan, tuple[int, int]] = {}

    def kind(self, gradients: bool, accumulating: bool, given: Any = ()) -> Kind:
        """The kind of a call: of a step of several calls all are planned together, once it is known how many.

        Args:
            gradients: whether the call has gradients.
            accumulating: whether there are gradients of parameters.
            given: its arguments.
        """
        if self._budget is None:
            return Kind(gradients, accumulating)
        earlier, others = self._sessions.earlier.alive(), self._sessions.group.alive(self._sessions)
        if not gradients:
            kind = Kind(gradients, accumulating, beside=bool(earlier or others))
            self._let_go(kind.plan, [others, earlier], given, self._sessions.around.left)
            return kind
        if not earlier:
            self._together = self._sessions.earlier.most
            if self._sessions.group.several:
                self._together = min(self._together, self._expected())
        self._calls += 1
        kind = Kind(gradients, accumulating, self._together)
        if not earlier:
            self._let_go(kind.plan, [others], given)
        return kind

    def _expected(self) -> int:
        """How many calls the step that begins has by those before it: as many as there were after such ones."""
        if self._calls:
            self._turns[self._turn] = self._calls
        self._turn = self._calls, len(self._sessions.group.alive(self._sessions))
        self._calls = 0
        return self._turns.get(self._turn, self._sessions.earlier.most)

    def expect(self, arguments: Mapping[int, int]) -> None:
        """A step turns out to have one more call than was planned for: the next ones are planned with it."""
        step = self._sessions.earlier
        earlier = step.alive()
        step.expect(len(earlier) + 1, without_made(self._alive(), arguments))
        if earlier and self._budget is not None:
            KnownCalls().put(self._name, self._budget.text, earlier[0].graphs[0].key, step.most, step.inputs)

    def make_fit(self, session: Session, graph: Figures) -> bool:
        """Let earlier calls of the step go of what they saved, if a graph has room beside them then as it is planned.

        They recompute it as their backward begins.
        """
        every = [ran for steps in self._steps() for ran in steps.if_dropped()]
        enough = session.fits_beside(every, graph)
        if enough:
            self.drop()
        return enough

    @property
    def can_drop(self) -> bool:
        """Whether earlier calls of the step hold what they can recompute."""
        return any(
            ran.recomputed is not None and not ran.recomputed.dropped
            for steps in self._steps()
            for ran in steps.alive()
        )

    def drop(self) -> None:
        """Let earlier calls of the step go of what they saved."""
        for steps in self._steps():
            steps.drop(functools.partial(_recomputes, weakref.ref(self._sessions)))

    def _alive(self) -> list[Ran]:
        """The calls of the present step so far, of all models of the budget."""
        return [ran for steps in self._steps() for ran in steps.alive()]

    def _steps(self) -> list[EarlierCalls]:
        return [*self._sessions.group.steps(self._sessions), self._sessions.earlier]

    def _let_go(self, plan: Plan, waiting: Sequence[Sequence[Ran]], given: Any, left: int = 0) -> None:
        """Plan a call anew where more is held beside it than it was planned for.

        Args:
            plan: of the call.
            waiting: calls of a training step whose backward has not run, of other models and of this one.
            given: arguments of the call; those that earlier calls have made count once.
            left: bytes that the loop has made behind those and holds.
        """
        known, earlier = self._sessions.get(plan), any(waiting)
        own = arguments_of(given, {}) if earlier else {}
        held = sum(sum(ran.saved for ran in each) + arguments_beside(each, own) for each in waiting)
        # What a session counts is of its latest call; other calls of the step may have other arguments.
        before, behind = self._planned.get(plan, (0, 0))
        more = known is not None and held > max(before, known.planned_beside)
        more |= left > behind + SCALARS
        if known is not None and earlier and more:
            self._sessions.forget(plan)
        if known is None or (earlier and more):
            self._planned[plan] = held, left

    @contextlib.contextmanager
    def beside(self, session: Session, args: Any, kwargs: Any) -> Iterator[None]:
        """Within: the session knows what earlier calls of the step hold beside this one."""
        earlier, others = self._sessions.earlier.alive(), self._sessions.group.alive(self._sessions)
        inputs = arguments_beside([*others, *earlier], arguments_of(args, kwargs)) if earlier or others else 0
        session.begins_beside(earlier, others, inputs, can_drop=self.can_drop)
        try:
            yield
        finally:
            session.ends_beside()

    @contextlib.contextmanager
    def expecting(self, session: Session, args: Any, kwargs: Any) -> Iterator[None]:
        """Within: a call that is refused beside earlier ones of its step is reckoned with from the next step on."""
        try:
            yield
        except BudgetError:
            if session.earlier:
                self.expect(arguments_of(args, kwargs))
            raise

    def note(self, session: Session, outputs: Any, args: Any, kwargs: Any) -> None:
        """Remember what a call holds until its backward has run.

        Where hooks take what it saves, a checkpoint around the model say, it holds nothing: backward runs such a call
        again, which is no further call of the step, and must save the same.
        """
        if session.ran and hooks_in_force():
            if session.budget is not None:
                session.note(HOOKED)
        elif session.ran:
            own = arguments_of(args, kwargs)
            leaves = (leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
            made = (storage for key, storage in storages_of(leaves, allocated=True).items() if key not in own)
            ran = Ran(
                tuple(session.ran),
                without_made(self._alive(), own),
                tuple(session.first_calls.listed),
                made=tuple(map(weakref.ref, made)),
            )
            self._sessions.earlier.note(ran, outputs, len(self._sessions.earlier.alive()))
            self._sessions.group.ran(self._sessions, session.loss_beside)

    def let_go_unseen(self, session: Session, outputs: Iterable[torch.Tensor]) -> None:
        """Let calls go of what they saved where what comes before their backward is not known, if they fit then.

        What a loop makes of outputs (a loss, a head, a second pass) was never seen in its first step. Recomputing
        costs that one step another forward, and leaves to the loop all that is not its outputs.

        Args:
            session: of the call that has returned.
            outputs: of it.
        """
        if session.seen.known:
            return
        wanted = [each for each in outputs if each.requires_grad]
        if not wanted or any(each.numel() == 1 for each in wanted):  # it returns its loss
            return
        if not session.counts_all and session.part():  # a fraction of a part grows with what its step turns out to have
            return
        steps = self._sessions.earlier
        if not all(call.keeps_all for ran in steps.alive() for call in [ran.recomputed] if call is not None):
            return
        if not session.fits_around([*self._sessions.group.alive(self._sessions), *steps.if_dropped()]):
            return
        steps.drop(lambda ran: None)


def _recomputes(owner: weakref.ref[Sessions], call: Ran) -> None:
    """A call is about to be recomputed beside those of its step whose backward has not run."""
    sessions = owner()
    if sessions is None or sessions.last is None:
        return
    others = [ran for ran in (*sessions.group.alive(sessions), *sessions.earlier.alive()) if ran.calls != call.calls]
    sessions.last.before_recomputing(others, call)
