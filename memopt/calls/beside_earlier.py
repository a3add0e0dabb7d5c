"""A call that has no room beside what earlier calls of its step hold: these let go of it, or it is planned anew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from memopt.budget import BudgetError
from memopt.calls.guard_fast_path import Kind
from memopt.calls.sessions import Sessions
from memopt.calls.several import SeveralCalls
from memopt.step.earlier_calls import DoesNotFitBesideError, Figures


def run_beside(
    sessions: Sessions, several: SeveralCalls, kind: Kind, graph: Figures | None, run: Callable[[Kind], Any]
) -> Any:
    """Run a call that has no room as it is planned.

    Earlier calls let go of what they saved where that is enough; else the call is planned with what they hold, and
    after that with what they hold once they have let go.

    Args:
        sessions: the model's compilations.
        several: the calls of its step.
        kind: of the call.
        graph: its graph, as it was planned; None where it could not be.
        run: runs it as a call of another kind.

    Raises:
        BudgetError: it has no room all the same.
    """
    if graph is not None and several.make_fit(sessions.of(kind), graph):
        with contextlib.suppress(DoesNotFitBesideError):
            return run(kind)
    kind = kind._replace(calls=1, beside=True)
    if kind.plan in sessions:
        try:
            return run(kind)
        except DoesNotFitBesideError as error:
            graph = error.graph
        # It may have been planned in an earlier step, whose calls had let go by then.
        if several.make_fit(sessions.of(kind), graph):
            with contextlib.suppress(DoesNotFitBesideError):
                return run(kind)
    if several.can_drop:
        with contextlib.suppress(DoesNotFitBesideError, BudgetError):
            return _run_anew(sessions, kind, run, last_word=False)
        several.drop()
    return _run_anew(sessions, kind, run, last_word=True)


def _run_anew(sessions: Sessions, kind: Kind, run: Callable[[Kind], Any], *, last_word: bool) -> Any:
    """Plan a call beside what earlier ones of its step hold, and run it; `last_word`: it is refused without room."""
    sessions.forget(kind.plan)
    sessions.of(kind).has_last_word(last_word)
    try:
        return run(kind)
    finally:
        sessions.of(kind).has_last_word(False)
