"""How an inference program is made to fit: as it is, without folded weights, or in chunks of its batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memopt.memory.timeline import Timeline
from memopt.pass_manager import Pass, PassManager
from memopt.passes.checkpoint import workspace
from memopt.passes.chunk_batch import ChunkBatch
from memopt.passes.fuse_conv_bn import FuseConvBn
from memopt.passes.inplace import Inplace
from memopt.patterns.batch import find_batch
from memopt.program import Program
from memopt.step.planned import Planned, constant_bytes

if TYPE_CHECKING:
    from memopt.session import Session


def plan_within(session: Session, program: Program, before: Timeline, room: int | None) -> tuple[Planned, str]:
    """Rewrite an inference program so that it takes no more than `room` bytes beside what is resident.

    Tried in turn: the pipeline; the same without folded weights, which are held beside the model's own; and either in
    chunks of the batch, 2, 4, 8 and so on, up to one sample at a time.

    Args:
        session: its passes, its engine and how it measures.
        program: as captured.
        before: its memory.
        room: bytes; None for no limit.

    Returns:
        The first plan that fits, else the one that takes least; and why the batch could not be divided, empty where
        that was not tried or did work.
    """
    from memopt.passes import INFERENCE

    passes: Sequence[Pass] = INFERENCE if session.passes is None else session.passes
    unfolded = [item for item in passes if not isinstance(item, FuseConvBn)]
    fuses = session.engine().fuses and session.resident.device.type == "cuda"
    if session.passes is None and fuses and not session.frozen:
        passes = unfolded  # its kernels take a batch norm in as it is: folded weights would only be held twice
    planned = _rewritten(session, program, passes, before)
    if room is None or _taken(planned) <= room:
        return planned, ""
    plans = [(planned, passes)]
    if session.passes is None and len(unfolded) < len(passes):
        plans.append((_rewritten(session, program, unfolded, before), unfolded))
    found = [item for item, _ in plans]
    reason = ""
    if all(_taken(item) > room for item in found):
        for item, chosen in plans:
            divided, reason = _in_chunks(session, item, chosen, room)
            found.append(divided)
    return next((item for item in found if _taken(item) <= room), None) or min(found, key=_taken), reason


def _rewritten(session: Session, program: Program, passes: Sequence[Pass], before: Timeline) -> Planned:
    manager = PassManager(passes, session.verify, record=True, room=session.room)
    result, records = manager.run(program)
    return _measured(session, Planned(program, program, result, before, before, records, {}))


def _measured(session: Session, planned: Planned) -> Planned:
    """With the memory of the program as the session's engine lays it out."""
    program = session.table.placed(planned.program)
    costs = session.table.measure_all(program)
    line = session.engine().timeline(program, workspace(program, costs))
    return dataclasses.replace(planned, program=program, timeline=line, costs=costs)


def _in_chunks(session: Session, planned: Planned, passes: Sequence[Pass], room: int) -> tuple[Planned, str]:
    """The plan in the fewest chunks that fit, else in those that take least; and why there are none."""
    late = [item for item in passes if isinstance(item, Inplace)]
    best, kept, chunks = planned, 0, 2
    while _taken(best) > room:
        divided, records = PassManager([ChunkBatch(chunks), *late], False).run(planned.program)
        if not records[0].changes:
            return planned, "; ".join(f"{refusal.node}: {refusal.reason}" for refusal in records[0].refusals)
        attempt = _measured(session, dataclasses.replace(planned, program=divided))
        if _taken(attempt) < _taken(best):
            best, kept = attempt, chunks
        if chunks >= find_batch(planned.program).size:
            break
        chunks *= 2
    if not kept:
        return planned, ""
    manager = PassManager([ChunkBatch(kept), *late], session.verify, record=True, room=session.room)
    program, records = manager.run(planned.program)
    finished = dataclasses.replace(planned, program=program, records=(*planned.records, *records))
    return _measured(session, finished), ""


def _taken(planned: Planned) -> int:
    """Bytes that an inference program takes beside what is resident."""
    return constant_bytes(planned.program) + planned.timeline.peak_bytes
