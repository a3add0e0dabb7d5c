"""How an inference program is made to fit: as it is, without folded weights, or with stretches in chunks."""

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
from memopt.patterns.batch import NotBatched
from memopt.program import Program
from memopt.step.planned import Planned, constant_bytes
from memopt.step.stretches import TOLD, Stretches, told

if TYPE_CHECKING:
    from memopt.session import Session

# The search for less goes by one part in so many of a limit at least.
_STEP = 20


def plan_within(session: Session, program: Program, before: Timeline, room: int | None) -> tuple[Planned, str]:
    """Rewrite an inference program so that it takes no more than `room` bytes beside what is resident.

    Tried in turn: the pipeline; the same without folded weights, which are held beside the model's own; and either with
    those stretches in chunks of the batch that take least time more.

    Args:
        session: its passes, its engine and how it measures.
        program: as captured.
        before: its memory.
        room: bytes; None for no limit.

    Returns:
        The first plan that fits, else the one that takes least; and what could not be divided and why, empty where
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
        if _taken(plans[-1][0]) <= room:
            return plans[-1][0], ""
    found, reason = [item for item, _ in plans], ""
    for item, chosen in plans:
        divided, reason = _in_chunks(session, item, chosen, room)
        if _taken(divided) <= room:
            return divided, ""
        found.append(divided)
    return min(found, key=_taken), reason


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
    """The plan with stretches in chunks that fits in least time, else one that takes least; and what is in the way.

    The search counts bytes by storage. An engine may lay values out otherwise: what it takes more is allowed for in
    the next attempt, and the last one is made for as little as there can be.
    """
    late = [item for item in passes if isinstance(item, Inplace)]
    try:
        device = session.table.device(planned.program.calls[0])
        stretches = Stretches(planned.program, planned.timeline, planned.costs, device)
    except NotBatched as error:
        return planned, str(error)
    least, best, kept = stretches.search.least_bytes(), planned, None
    limit = max(least, room - constant_bytes(planned.program))
    while True:
        found = stretches.within(limit)
        assert found is not None
        chunking, parts = found
        if parts:
            result = ChunkBatch.of(parts).run(planned.program)
            if not result.changes:
                return planned, "; ".join(f"{refusal.node}: {refusal.reason}" for refusal in result.refusals)
            divided = result.program
            for item in late:
                divided = item.run(divided).program
            attempt = _measured(session, dataclasses.replace(planned, program=divided))
            if _taken(attempt) < _taken(best):
                best, kept = attempt, found
        if _taken(best) <= room or limit <= least:
            break
        limit = max(least, min(chunking.peak_bytes - 1, limit - max(_taken(best) - room, limit // _STEP)))
    if kept is None:
        return planned, stretches.reason
    chunking, parts = kept
    manager = PassManager([ChunkBatch.of(parts), *late], session.verify, record=True, room=session.room)
    program, records = manager.run(planned.program)
    session.notes[:] = [text for text in session.notes if not text.startswith(TOLD)]
    session.note(told(parts, planned.program, stretches.batch.size, chunking.extra_seconds))
    finished = dataclasses.replace(best, program=program, records=(*planned.records, *records))
    return finished, stretches.reason


def _taken(planned: Planned) -> int:
    """Bytes that an inference program takes beside what is resident."""
    return constant_bytes(planned.program) + planned.timeline.peak_bytes
