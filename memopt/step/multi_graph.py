"""A multi-graph step: its graphs share the budget, and all are planned before the first one runs.

Where an engine makes code of its own, the step is judged by the code of all its graphs together: that the code of one
takes more than its plan would else be found out only when those before it are compiled, and have run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from memopt.program import Program
from memopt.step.plan_feedback import corrected
from memopt.step.plan_request import PlanRequest
from memopt.torch_compat.dispatch import no_autocast

if TYPE_CHECKING:
    from memopt.compilation.session import Session


@dataclasses.dataclass(frozen=True)
class _Rehearsed:
    """What the code of a whole step takes, planned with a correction; `memopt.step.plan_feedback.Judged`."""

    correction: int
    saving: int
    excess: int | None


@contextlib.contextmanager
def planned_whole(session: Session, collect: Callable[[], list[Program]]) -> Iterator[None]:
    """Plan the step; within, its graphs are lowered as planned, operator by operator where no code keeps the budget.

    Args:
        session: whose step it is.
        collect: captures the step's graphs, in order.

    Raises:
        BudgetError: no plan keeps the budget. Nothing was run.
    """
    programs = _training(collect)
    if not programs:  # nothing has gradients: each graph is planned by itself
        yield
        return
    if not session.engine().rehearses or session.budget is None:
        _plan(session, programs)
        yield
        return
    fits, least = _by_code(session, programs, collect)
    while not fits and (session.plans_anew() or session.allows_no_more()):
        fits, further = _by_code(session, programs, collect)
        least = min(filter(None, (least, further)), default=None)
    if fits:
        yield
        return
    session.note(
        "no code was found with which the graphs of this step keep the budget together: they run operator by operator, "
        "as with backend='aten'"
    )
    session.forget_code()
    with session.operator_by_operator():
        session.refused_at_most(lambda: _plan(session, _training(collect)), least)
        yield


def _by_code(
    session: Session, programs: Sequence[Program], collect: Callable[[], list[Program]]
) -> tuple[bool, int | None]:
    """Plan the step until its code keeps the budget; return whether it does, and bytes that known code can do with."""
    least: list[int] = []
    request = PlanRequest()

    def attempt() -> _Rehearsed | None:
        _plan(session, programs, request)
        session.forget_code()
        with session.collection.rehearsal():
            collect()
        if not session.coded():
            return None
        saving, excess = session.judged()
        if excess is not None and not session.feasible:  # the code of the deepest plan would be made again
            least.append(excess + session.usable(session.limit_bytes))
        return _Rehearsed(request.correction, saving, excess)

    best, last = corrected(session, request, attempt, lambda: True)
    if best is not None and not last:
        request.correction = best.correction
        _plan(session, programs, request)
    return best is not None, min(least, default=None)


def _training(collect: Callable[[], list[Program]]) -> list[Program]:
    return [program for program in collect() if program.training]


def _plan(session: Session, programs: Sequence[Program], request: PlanRequest | None = None) -> None:
    """Plan the graphs; with a request, for an engine whose code has the last word."""
    with no_autocast():  # the casts are in the programs
        session.plan_training(programs, by_timeline=request is None, request=request)
