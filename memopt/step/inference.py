"""The inference programs of one model: planned within its budget, and held to what their runs take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from memopt.budget import BudgetError
from memopt.memory.timeline import timeline
from memopt.passes.checkpoint import workspace
from memopt.program import Program
from memopt.report.build import build_report
from memopt.report.record import Report
from memopt.step.exact_trial import tried_as_is
from memopt.step.inference_plan import HopelessError, plan_within
from memopt.step.planned import Planned, constant_bytes

if TYPE_CHECKING:
    from memopt.compilation.session import Session

# If a run is over, the next plan is for at least budget / _STEP less.
_STEP = 20


@dataclasses.dataclass
class Inferred:
    """What is known of a session's inference programs.

    Attributes:
        planned: the one that was planned last.
        spared: bytes of the budget that runs took beyond what was planned.
        room: bytes that the plan was made for; None for no limit.
        unused: bytes that the plan leaves of them; negative where it takes more.
        seconds: of a call, as the engine that was chosen last ran it.
        not_in_chunks: why the batch cannot be divided; empty where that was not tried or did work.
    """

    planned: Planned | None = None
    spared: int = 0
    room: int | None = None
    unused: int = 0
    seconds: float = 0.0
    not_in_chunks: str = ""

    def goes_back_to(self, planned: Planned | None) -> None:
        """What is run now is what was planned last."""
        self.planned = planned

    def was_timed(self, seconds: float) -> None:
        """The engine that was chosen took so many seconds for a call."""
        self.seconds = seconds

    def spares(self, size: int) -> None:
        """Runs took so many bytes of the budget beyond what was planned."""
        self.spared = size


def plan_inference(session: Session, program: Program, *, by_timeline: bool = True) -> Planned:
    """Rewrite one inference program.

    Args:
        session: whose program it is: its budget, passes and engine.
        program: the graph as captured.
        by_timeline: whether the program's own timeline decides; else the engine settles it: see `settling`.

    Raises:
        BudgetError: the peak is over the budget, or no plan could come near it.
    """
    session.prepare_allocator()
    measures = session.engine().measures and not session.role.trains  # a step's other graphs multiply as well
    if measures:  # what its runs take includes what libraries take in them
        session.resident = dataclasses.replace(session.resident, libraries=0)
    else:
        session.count_libraries([program])
    program = session.table.placed(program)
    session.alone = timeline(program).peak_bytes
    before = timeline(program, workspace(program, session.table.measure_all(program)))
    own = session.resident.total + constant_bytes(program) + before.peak_bytes
    if not session.role.trains:
        session.reference.infers(own)
    limit = session.held_to(own)
    room = None
    if limit is not None:  # the allocator's slack is seen in runs too: what they take more is planned for less
        room = (session.usable(limit) if by_timeline else limit) - session.resident.total - session.inferred.spared
    try:
        hope = None if room is None else room + session.inferred.spared
        session.inferred.room = room
        planned, session.inferred.not_in_chunks = plan_within(session, program, before, room, hope)
    except HopelessError as error:
        assert limit is not None
        session.inferred.not_in_chunks, session.inferred.unused = error.reason, -1
        needed = session.resident.total + error.minimum_bytes
        least = error.minimum_bytes
        _put_on_record(session, build_report(session, [error.planned], least, least, None, before.peak_bytes))
        if session.waits_for_training(needed):
            return plan_inference(session, program, by_timeline=by_timeline)
        raise _over(session, needed, limit) from None
    if not measures and session.count_libraries([planned.program]):
        return plan_inference(session, program, by_timeline=by_timeline)
    peak, constants = planned.timeline.peak_bytes, constant_bytes(planned.program)
    session.inferred.unused = 0 if room is None else room - constants - peak
    session.inferred.planned = planned = tried_as_is(session, planned)
    session.note_failures([planned])
    _put_on_record(session, build_report(session, [planned], peak, peak, planned.measured, before.peak_bytes))
    needed = session.resident.total + constants + max(peak, planned.measured or 0)
    if by_timeline and limit is not None and needed > session.usable(limit):
        if session.waits_for_training(needed):
            return plan_inference(session, program, by_timeline=by_timeline)
        raise _over(session, needed, limit)
    return planned


def plan_for_less(session: Session, over: BudgetError, *, last: bool = False) -> bool:
    """Plan inference for so many bytes less from now on as a run of it was over; False where no plan takes less.

    Runs may take otherwise than their plans: what takes least by its plan may not do so when it runs. So the last plan
    is made for nothing, whatever the budget: what a refusal names is what that one takes, and any larger budget comes
    to it in the end.

    Args:
        session: whose program it is.
        over: by what a run was over.
        last: whether there is no further plan after the next one.
    """
    inferred = session.inferred
    room = 0 if inferred.room is None else inferred.room
    if room <= 0:
        return False
    less = inferred.unused + max(over.minimum_bytes - over.budget_bytes, over.budget_bytes // _STEP)
    inferred.spared += room if last or inferred.unused < 0 else min(room, less)
    return True


def settling(session: Session) -> Callable[..., None]:
    """A function that puts on record what a run of the program planned last took above what is resident, in bytes.

    It takes None where that could not be seen: the program's own timeline decides then. It raises BudgetError when the
    budget is not kept, or with `short=True`, which says that memory ran out in the run.
    """
    planned = session.inferred.planned
    assert planned is not None
    resident, constants = session.resident, constant_bytes(planned.program)
    own = resident.total + constant_bytes(planned.source)
    plain, predicted = planned.timeline_before.peak_bytes, planned.timeline.peak_bytes

    def settle(measured: int | None, short: bool = False) -> None:
        session.resident = resident
        taken = predicted if measured is None else measured
        _put_on_record(session, build_report(session, [planned], predicted, taken, measured, plain))
        base = resident.total + constants
        limit = session.limit(own + plain)
        if short and limit is not None:
            taken = max(taken, session.usable(limit) - base + limit // _STEP)
        if limit is not None and base + taken > session.usable(limit) and not session.waits_for_training(base + taken):
            raise _over(session, base + taken, limit)

    return settle


def emitted_inference(session: Session, peak: int) -> int | None:
    """Put on record that an engine's code for the program planned last takes `peak` bytes of its own.

    Returns:
        Bytes by which it exceeds the budget (negative when it does not); None without a budget.
    """
    planned = session.inferred.planned
    assert planned is not None
    report = build_report(session, [planned], peak, peak, None, planned.timeline_before.peak_bytes)
    _put_on_record(session, report)
    limit = report.budget_bytes
    return None if limit is None else report.peak_bytes - session.usable(limit)


def _put_on_record(session: Session, report: Report) -> None:
    """In a step of training that is planned, what runs there without gradients is no report of the step."""
    if session.report is None or session.step is None:
        session.report = report


def _over(session: Session, needed: int, limit: int) -> BudgetError:
    error = session.over(needed, limit)
    if session.inferred.not_in_chunks:
        error.args = (f"{error}; its batch cannot be run in chunks: {session.inferred.not_in_chunks}",)
    return error
