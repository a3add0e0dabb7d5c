"""Whether a step is planned with the rewrites that reduce its minimum, or without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memopt.pass_manager import Pass, PassRecord, Refusal
from memopt.step.curve import CurvePoint, monotone
from memopt.step.planner import StepPlan

# A plan without them that recomputes for no more than this share of the step's time is taken as it is.
WORTH = 0.03
# An engine's own partition of a step with such rewrites is taken where it takes at most this share longer than a plan.
WORTH_OF_CUT = 0.01
# Rewrites are looked at set otherwise, too, where they cost more than this share of the step's time: that is the most
# that can be saved of it.
WORTH_OF_OTHERS = 0.01


def acceptable(without: StepPlan) -> bool:
    """Whether a plan without the rewrites needs no other: it keeps the limit, for next to no time."""
    return without.feasible and _extra_share(without) <= WORTH


def beside(used: Sequence[Pass]) -> list[tuple[Pass, ...]]:
    """What to use of rewrites beside all of them: all but each, and each alone."""
    without = [tuple(other for other in used if other is not item) for item in used] if len(used) > 1 else []
    alone = [(item,) for item in used] if len(used) > 2 else []  # of two, each is all but the other
    return [*without, *alone]


def otherwise(used: Sequence[Pass]) -> list[tuple[Pass, ...]]:
    """All of the rewrites with one of them set otherwise, which costs less and reduces the minimum by less."""
    return [tuple(other if entry is item else entry for entry in used) for item in used for other in item.others]


def deeper(used: Sequence[Pass]) -> tuple[Pass, ...] | None:
    """The rewrites with those set so that they reduce the minimum further that can be; None where none can."""
    found = tuple(item.deeper or item for item in used)
    return None if found == tuple(used) else found


def cheapest(plans: Sequence[StepPlan]) -> int:
    """Index of the plan that keeps the limit in the least time; where none does, of the one that comes nearest.

    Of equal plans the first is taken.
    """
    feasible = [index for index, plan in enumerate(plans) if plan.feasible]
    if feasible:
        return min(feasible, key=lambda index: plans[index].seconds)
    return min(range(len(plans)), key=lambda index: plans[index].minimum_bytes)


def _extra_share(plan: StepPlan) -> float:
    base = plan.seconds - plan.extra_seconds
    return plan.extra_seconds / base if base > 0 else 0.0


def joined(chosen: StepPlan, others: Sequence[StepPlan]) -> StepPlan:
    """The chosen plan, with the least peak and the curve of all; where it is infeasible, with its own minimum peak.

    That one was measured, where steps are: what other plans are said to need may be less than they take.
    """
    points = [*chosen.curve]
    points += [dataclasses.replace(point, chosen=False) for other in others for point in other.curve]
    fastest = min((point.seconds for point in points), default=0.0)
    rebased = [
        dataclasses.replace(point, extra=point.seconds / fastest - 1 if fastest > 0 else 0.0) for point in points
    ]
    curve: tuple[CurvePoint, ...] = monotone(rebased)
    minimum = min(plan.minimum_bytes for plan in (chosen, *others)) if chosen.feasible else chosen.minimum_bytes
    return dataclasses.replace(chosen, minimum_bytes=minimum, curve=curve)


def unused(records: Sequence[PassRecord]) -> tuple[PassRecord, ...]:
    """The records of rewrites that were considered and not taken: each change becomes a refusal that says so."""
    reason = "not used: the plan without it keeps the budget at no more time"
    return tuple(
        dataclasses.replace(
            record,
            nodes_after=record.nodes_before,
            changes=(),
            refusals=(*record.refusals, *(Refusal(change.before[0], reason) for change in record.changes)),
            evidence=None,
        )
        for record in records
    )
