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
from memopt.solve.chunks import live_bytes
from memopt.step.planned import Planned, constant_bytes
from memopt.step.stretches import TOLD, Stretches, chunks_line

if TYPE_CHECKING:
    from memopt.compilation.session import Session

# The search for less goes by limit / _STEP at least.
_STEP = 20
# A program in chunks of more calls than this is not made only to say what the minimum is, where that is far away.
_CALLS = 1500
_FAR = 2  # times what there is
_LOSS = 10  # size / _LOSS is allowed for what an engine's layout takes beyond the figure


class HopelessError(Exception):
    """A limit is so far from anything that could be planned that nothing was.

    Attributes:
        planned: what the figures are of; not in chunks.
        minimum_bytes: what a plan in chunks would take, by figures alone.
        reason: what could not be divided, and why; empty where all can.
    """

    def __init__(self, planned: Planned, minimum_bytes: int, reason: str) -> None:
        super().__init__(f"the minimum is {minimum_bytes} bytes")
        self.planned, self.minimum_bytes, self.reason = planned, minimum_bytes, reason


def plan_within(
    session: Session, program: Program, before: Timeline, room: int | None, hope: int | None = None
) -> tuple[Planned, str]:
    """Rewrite an inference program so that it takes no more than `room` bytes beside what is resident.

    Tried in turn: the pipeline; the same without folded weights, which are held beside the model's own; and either with
    those stretches in chunks of the batch that take least time more.

    Args:
        session: its passes, its engine and how it measures.
        program: as captured.
        before: its memory.
        room: bytes; None for no limit.
        hope: bytes that there are, where `room` is less because runs took more than their plans.

    Returns:
        The first plan that fits, else the one that takes least; and what could not be divided and why, empty where
        that was not tried or did work.

    Raises:
        HopelessError: see there.
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
    prepared = []
    for item, chosen in plans:
        if not item.program.calls:  # it computes nothing
            continue
        try:
            device = session.table.device(item.program.calls[0])
            prepared.append((item, chosen, Stretches(item.program, item.timeline, item.costs, device)))
        except NotBatched as error:
            reason = str(error)
    _check_hope(session, prepared, room if hope is None else hope)
    for item, chosen, stretches in prepared:
        divided, reason = _in_chunks(session, item, stretches, chosen, room)
        if _taken(divided) <= room:
            return divided, ""
        found.append(divided)
    return min(found, key=_taken), reason


def _check_hope(session: Session, prepared: Sequence[tuple[Planned, Sequence[Pass], Stretches]], room: int) -> None:
    """Raise HopelessError where no plan can come near, and to make the least one would take long."""
    if not prepared:
        return
    twice = session.engine().exact  # what is put together is there beside its parts
    figures = [_figures(item, stretches, twice) for item, _, stretches in prepared]
    least, calls, best = min((*found, index) for index, found in enumerate(figures))
    if _FAR * room < least and calls > _CALLS:
        raise HopelessError(prepared[best][0], least, prepared[best][2].reason)


def _figures(planned: Planned, stretches: Stretches, twice: bool) -> tuple[int, int]:
    """Of the plan in chunks that takes least: about how many bytes it takes, and how many calls it has."""
    problem, limit = stretches.search.problem, stretches.search.minimum_bytes()
    found = stretches.search.within(limit)
    assert found is not None
    parts = found.stretches
    whole = [sum(v.size for v in problem.values if part.start <= v.made < part.stop <= v.last) for part in parts]
    beside = max(0, planned.timeline.peak_bytes - max(live_bytes(problem), default=0))
    least = limit + beside + (max(whole, default=0) if twice else 0)
    calls = len(planned.program.calls) + sum((part.stop - part.start) * (part.chunks - 1) for part in parts)
    return constant_bytes(planned.program) + least + least // _LOSS, calls


def _rewritten(session: Session, program: Program, passes: Sequence[Pass], before: Timeline) -> Planned:
    manager = PassManager(passes, session.verify, record=True, available=session.available)
    result, records = manager.run(program)
    return _measured(session, Planned(program, program, result, before, before, records, {}))


def _measured(session: Session, planned: Planned) -> Planned:
    """With the memory of the program as the session's engine lays it out."""
    program = session.table.placed(planned.program)
    costs = session.table.measure_all(program)
    line = session.engine().timeline(program, workspace(program, costs))
    return dataclasses.replace(planned, program=program, timeline=line, costs=costs)


def _in_chunks(
    session: Session, planned: Planned, stretches: Stretches, passes: Sequence[Pass], room: int
) -> tuple[Planned, str]:
    """The plan with stretches in chunks that fits in least time, else one that takes least; and what is in the way.

    The search counts bytes by storage. An engine may lay values out otherwise: what it takes more is allowed for in
    the next attempt, and the last one is made for as little as there can be.
    """
    late = [item for item in passes if isinstance(item, Inplace)]
    least, best, kept = stretches.search.minimum_bytes(), planned, None
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
    manager = PassManager([ChunkBatch.of(parts), *late], session.verify, record=True, available=session.available)
    program, records = manager.run(planned.program)
    session.notes[:] = [text for text in session.notes if not text.startswith(TOLD)]
    session.note(chunks_line(parts, planned.program, stretches.batch.size, chunking.extra_seconds))
    finished = dataclasses.replace(best, program=program, records=(*planned.records, *records))
    return finished, stretches.reason


def _taken(planned: Planned) -> int:
    """Bytes that an inference program takes beside what is resident."""
    return constant_bytes(planned.program) + planned.timeline.peak_bytes
