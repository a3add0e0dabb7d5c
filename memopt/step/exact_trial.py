"""Trial steps of plans that run as they are, operator by operator: what they show beyond the plan's own timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memopt.budget import BudgetError
from memopt.common.garbage import collect
from memopt.memory.live_tensors import live_bytes
from memopt.step.planned import Planned, measured_peak, predicted_peak
from memopt.step.trial import bytes_beside, tried

if TYPE_CHECKING:
    from memopt.compilation.planned_step import PlannedStep
    from memopt.compilation.session import Session


def tried_as_is(session: PlannedStep, planned: Planned) -> Planned:
    """The planned graph with what a run of it took, where one says something and can be had."""
    if not session.verify or not session.exact:
        return planned
    limit = session.limit(0)
    if limit is not None and planned.timeline.peak_bytes > session.usable(limit) - _there(session, planned):
        # It is refused, or planned for less: `refused_as_tried` takes it before its minimum is named. Or it fits only
        # once outputs of the step before are gone, or calls that wait for their backward.
        return planned
    return tried(planned)


def _there(session: PlannedStep, planned: Planned) -> int:
    """Bytes beside which a run is taken: as they are counted or, where that is more, as they are now.

    Calls that wait for their backward may hold more than is left to them in a plan of the whole step, and planning
    holds something itself.
    """
    collect()
    live = live_bytes(session.resident.device) - session.uncounted() + bytes_beside(planned.program)
    return max(session.resident.total + session.older(), live)


def refused_as_tried(session: Session, refused: BudgetError) -> BudgetError:
    """A refusal of the step that was planned last, whose minimum is no less than a run of that has taken."""
    planned = session.step.planned if session.step is not None and session.verify and session.exact else ()
    if not planned or all(item.measured is not None for item in planned):
        return refused
    runs = [item if item.measured is not None else tried(item) for item in planned]
    more = measured_peak(runs, 0) - predicted_peak(planned)
    if more <= 0:
        return refused
    least = refused.minimum_bytes + more
    return BudgetError(least, refused.budget_bytes, refused.breakdown, refused.stuck_bytes, refused.beside)
