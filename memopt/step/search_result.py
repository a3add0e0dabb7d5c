"""The result of a search."""

from __future__ import annotations

import dataclasses

from memopt.pass_manager import Pass
from memopt.step.plan_store import StoredPlan
from memopt.step.planned import Planned
from memopt.step.planner import StepPlan


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search has chosen.

    Attributes:
        planned: the graphs; with the records of all their passes once they are proved.
        plan: the step's plan, in bytes above what is resident.
        lowering: the rewrites that reduce the minimum, those that are used.
        proved: whether the records are there; see `StepSearch.prove`.
    """

    planned: list[Planned]
    plan: StepPlan
    lowering: tuple[Pass, ...]
    proved: bool = False


def stored_plan(found: SearchResult) -> StoredPlan:
    """What is kept of a choice for the next process."""
    plans = [choice.plan for choice in found.plan.choices]
    return StoredPlan(
        lowering=tuple(item.key for item in found.lowering),
        schedules=tuple(plan.schedule for plan in plans),
        peaks=tuple(plan.peak_bytes for plan in plans),
        peak_bytes=found.plan.peak_bytes,
        minimum_bytes=found.plan.minimum_bytes,
        curve=found.plan.curve,
    )
