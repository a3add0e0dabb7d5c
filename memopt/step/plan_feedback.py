"""A plan corrected by what the code that comes of it really takes, until that keeps the budget and uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from memopt.compilation.session import Session
    from memopt.step.plan_request import PlanRequest

# How often a plan is corrected.
_PLANS = 4
# A plan that leaves more than this share of the budget unused, and recomputes, is tried once more with more room.
_SLACK = 0.04
# Where such a plan has code already, another one must be foreseen to take less of the step's time by this share: it
# costs as much as hundreds of steps to make.
_GAIN = 0.01


class Judged(Protocol):
    """What came of one plan."""

    @property
    def saving(self) -> int:
        """Bytes by which its code takes less than the program's own operations."""

    @property
    def excess(self) -> int | None:
        """Bytes by which the step exceeds the budget, negative where it does not; None without a budget."""


T = TypeVar("T", bound=Judged)


def leaves_much(session: Session, excess: int) -> bool:
    """Whether a plan that recomputes leaves so much of the budget that one with more room is worth a try.

    Args:
        session: what was planned last.
        excess: bytes by which the step exceeds the budget, negative where it does not.
    """
    return -excess > _SLACK * session.limit_bytes and session.recomputes


def corrected_by(saving: int, excess: int) -> int:
    """What the next plan is corrected by, in bytes: what code takes less than its plan, and where it is over, less."""
    return saving - max(0, excess) // 8


def corrected(
    session: Session, request: PlanRequest, attempt: Callable[[], T | None], may_correct: Callable[[], bool]
) -> tuple[T | None, bool]:
    """Attempt plans until the code of one keeps the budget.

    Args:
        session: whose step it is.
        request: what each attempt is planned with: its `correction` is set before the next one.
        attempt: makes a plan and its code; None where no code can be had.
        may_correct: whether the step that was attempted may be planned again.

    Returns:
        The attempt that keeps the budget by the plan that was made for the most room, and so recomputes least;
        None where none does. And whether it was the last.
    """
    best: T | None = None
    found: T | None = None
    kept, worth, between = 0, False, False  # of the best: its correction, and whether more than that is worth a try
    for left in reversed(range(_PLANS + 1)):
        found = attempt()
        if found is None:
            break
        if found.excess is None:
            return found, True
        if found.excess <= 0:
            if best is None or request.correction > kept:
                best, kept, worth = found, request.correction, session.gain(-found.excess // 2) >= _GAIN
            more = leaves_much(session, found.excess) and session.gain(-found.excess) >= _GAIN
            if between or not more or not may_correct():
                break
        elif not may_correct() or not (session.feasible if best is None else worth and not between):
            break
        correction = corrected_by(found.saving, found.excess)
        if best is not None and found.excess > 0:  # all the room was too much: half of it, once
            correction, between = (kept + request.correction) // 2, True
        if correction == request.correction or (left == 1 and best is not None):
            break  # the plan would be the same, or will do
        request.correction = correction if left > 1 else -session.limit_bytes  # the deepest plan of all
    return best, best is found
