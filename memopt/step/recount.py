"""What is known only after the first step, as an optimizer's state: what is planned is judged by it then."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memopt.memory.optimizer import OptimizerFootprint

if TYPE_CHECKING:
    from memopt.compilation.session import Session


def recount(session: Session, footprint: OptimizerFootprint | None, others: int, attributes: int | None = None) -> bool:
    """Count other optimizers and tensors of the process for the steps of a session, in its report too.

    Args:
        session: whose steps they are.
        footprint: of the optimizers as they are known now.
        others: bytes of other tensors of the process.
        attributes: bytes of tensors that the model holds beside parameters and buffers; None: as before.

    Returns:
        Whether what was planned keeps the budget with them; where not, it is to be planned anew.
    """
    resident, report, step = session.resident, session.report, session.step
    more = 0 if attributes is None else attributes - resident.attributes
    session.resident = dataclasses.replace(
        resident,
        optimizer=footprint,
        others=others,
        buffers=resident.buffers + more,
        attributes=resident.attributes + more,
    )
    added = session.resident.total - resident.total
    if report is None:
        return True
    predicted = max(report.peak_bytes + added, session.optimizer_peak())
    measured = report.measured_peak_bytes
    measured = None if measured is None else max(measured + added, session.optimizer_peak())
    unconstrained = max(report.unconstrained_bytes + added, session.optimizer_peak())
    limit = session.limit(unconstrained)
    judged = max(report.peak_bytes, report.measured_peak_bytes or 0)  # maybe by a step, beyond what is usable
    if limit is not None and max(predicted, measured or 0) > max(session.usable(limit), judged):
        return False
    if step is not None:
        fallen = 0 if limit is None else max(0, session.fell(limit))
        whole = step.whole + added
        session.step = dataclasses.replace(step, base=step.base + added, limit=limit, fallen=fallen, whole=whole)
    if step is not None and step.planned:  # a warm start has none: its report alone is there
        session.record.conclude(session)
        assert session.report is not None
        report = dataclasses.replace(session.report, executables=report.executables, seconds=report.seconds)
    else:
        state = session.resident.optimizer_state
        total = report.breakdown.total + added
        buffers = report.breakdown.buffers + more
        breakdown = dataclasses.replace(
            report.breakdown, optimizer_state=state, others=others, buffers=buffers, total=total
        )
        minimum = None if report.minimum_bytes is None else report.minimum_bytes + added
        report = dataclasses.replace(
            report, breakdown=breakdown, minimum_bytes=minimum, unconstrained_bytes=unconstrained, budget_bytes=limit
        )
    session.report = dataclasses.replace(report, peak_bytes=predicted, measured_peak_bytes=measured)
    if limit is not None:
        session.hold(limit)
    return True
