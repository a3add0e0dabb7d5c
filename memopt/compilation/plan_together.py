"""Plan all graphs of one training step together: attempts with more and more of the budget, until one stands."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memopt.common.phases import phase
from memopt.program import Program
from memopt.step.budget_state import Step
from memopt.step.exact_trial import tried_as_is
from memopt.step.plan_request import PlanRequest
from memopt.step.plan_transfer import SEARCHES, carried_from
from memopt.step.planned import Planned, constant_bytes, fingerprint, measured_peak, predicted_peak
from memopt.step.planner import StepPlan
from memopt.step.search import StepSearch
from memopt.step.search_result import SearchResult

if TYPE_CHECKING:
    from memopt.compilation.session import Session

log = logging.getLogger("memopt")

# Seconds for a search of a size beyond `SEARCHES`: enough to keep the budget, at some cost in time.
_LITTLE = 0.5
_ADVICE = (
    f"{SEARCHES} sizes of input were planned for, each larger than the last or of another form: give the largest as "
    "example_inputs, or pad to few sizes; further ones are planned in haste"
)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a step is planned within.

    Attributes:
        plain: bytes above what is resident that the step takes as captured.
        base: resident bytes, with constants of the graphs.
        whole: bytes that the step takes as eager runs it.
        limit: bytes of the budget; None without one.
        available: bytes above `base` that the plan may take; None without a budget.
    """

    plain: int
    base: int
    whole: int
    limit: int | None
    available: int | None


def plan_together(
    session: Session, programs: Sequence[Program], request: PlanRequest, *, by_timeline: bool = True
) -> list[Planned]:
    """Plan all graphs of one training step together.

    Args:
        session: whose step it is.
        programs: the graphs as captured.
        request: what is asked of the plan.
        by_timeline: whether the programs' own timelines decide; else an engine's code has the last word.

    Raises:
        BudgetError: no plan keeps the budget; `minimum_bytes` is the smallest feasible budget that was found.
    """
    keys = tuple(fingerprint(program) for program in programs)
    while (attempt := _attempt(session, keys, programs, request)) is None:
        pass
    search, limits, found = attempt
    step = Step(
        keys,
        tuple(found.planned),
        found.plan,
        limits.plain,
        limits.base,
        limits.limit,
        limits.whole,
        found.lowering,
        None if found.proved else search,
    )
    measured = measured_peak(found.planned, 0) if all(item.measured is not None for item in found.planned) else None
    session.plans(step, search.stages, measured)
    needed = _needed(session, step, measured) if by_timeline else None
    if needed is not None and limits.limit is not None:
        if search.stages.fusion is not None:  # a figure of what may be fused is no promise
            with session.operator_by_operator():
                return plan_together(session, programs, request)
        if session.aim_no_more():
            return plan_together(session, programs, request)
        raise session.over(needed, limits.limit)
    session.stands(step, searched=request.search)
    return found.planned


def _attempt(
    session: Session, keys: tuple[str, ...], programs: Sequence[Program], request: PlanRequest
) -> tuple[StepSearch, Limits, SearchResult] | None:
    """A plan, and what it was made within; None where the session has changed what is to be planned with."""
    session.prepare_allocator()
    session.count_libraries(programs)
    with phase("rewriting"):
        search = session.search_of(keys, programs)
    limits = _limits(session, keys, search, request.correction)
    if search.stages.searched and request.search:
        with phase("rewriting"):
            found = _found(session, search, programs, limits)
        if not found.plan.feasible and (session.plans_anew() or session.rewriting.arranges_no_more(search.stages)):
            return None
    else:
        unplanned = [tried_as_is(session, item) for item in search.unplanned(request.lowering)]
        peak = predicted_peak(unplanned)
        plan = StepPlan((), peak, peak, limits.available is None or peak <= limits.available)
        found = SearchResult(unplanned, plan, request.lowering)
        if session.record.at_once:
            with phase("rewriting"):
                found = search.prove(found)
    # A rewrite may have made a product of something else: then libraries keep memory that was not counted.
    return None if session.count_libraries(item.program for item in found.planned) else (search, limits, found)


def _limits(session: Session, keys: tuple[str, ...], search: StepSearch, correction: int) -> Limits:
    captured = search.captured
    plain = predicted_peak(captured)
    base = session.resident.total + sum(constant_bytes(item.program) for item in captured)
    whole = session.sees_step(keys, captured, base)
    limit = session.held_to(whole)
    session.reserves_for_capture(captured, limit)
    available = None if limit is None else session.usable(limit) - base + correction
    return Limits(plain, base, whole, limit, available)


def _found(session: Session, search: StepSearch, programs: Sequence[Program], limits: Limits) -> SearchResult:
    """The step's plan: a smaller step's from a larger one's, and of many sizes only the first few are searched."""
    first, sizes = search.searches == 0, session.sizes
    if sizes.exhausted and not sizes.serves(programs, limits.plain):
        search.seconds = min(search.seconds, _LITTLE)
        if _ADVICE not in session.notes:
            log.warning("memopt: %s", _ADVICE)
            session.note(_ADVICE)
    found = search.plan(limits.available, sizes.proposal(programs, limits.plain), prove=session.record.at_once)
    searched = first and search.searches > 0  # neither carried over from another size, nor loaded from disk
    if found.plan.feasible:
        names = [item.key for item in found.lowering]
        sizes.keep(programs, carried_from(names, found.plan.choices, limits.plain), searched=searched)
    return found


def _needed(session: Session, step: Step, measured: int | None) -> int | None:
    """Bytes that the step needs where that is more than the budget; None where it keeps the budget or has none."""
    if step.limit is None:
        return None
    usable, plan = session.usable(step.limit), step.plan
    peak = max(plan.peak_bytes, measured or 0)
    if plan.feasible and step.base + peak <= usable and session.optimizer_peak() <= usable:
        return None
    over = plan.feasible and step.base + peak > usable
    return max(step.base + (peak if over else plan.minimum_bytes), session.optimizer_peak())
