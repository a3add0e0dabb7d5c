"""From a planned step to its report."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from memopt.graph.record import GraphRecord
from memopt.graph.snapshot import snapshot
from memopt.memory.aliasing import analyse
from memopt.memory.allocator import with_slack
from memopt.memory.breakdown import MemoryBreakdown, TensorAtPeak
from memopt.memory.cost import roofline
from memopt.memory.rounding import allocated_bytes
from memopt.memory.timeline import Timeline, lifetimes
from memopt.pass_manager import PassRecord
from memopt.program import Program, source_line, tensors_of
from memopt.report.record import (
    ArenaBlock,
    ArenaReport,
    Environment,
    ExecutableReport,
    ProgramReport,
    Report,
    TensorRow,
)
from memopt.step.curve import CurvePoint, monotone
from memopt.step.planned import Planned, constant_bytes

if TYPE_CHECKING:
    from memopt.compilation.session import Session

_LARGEST = 10


def build_report(
    session: Session,
    planned: Sequence[Planned],
    peak: int,
    minimum: int,
    measured: int | None,
    plain: int,
    curve: Sequence[CurvePoint] = (),
) -> Report:
    """Put a planned step on record.

    Args:
        session: whose step it is.
        planned: its graphs.
        peak, minimum, measured, plain: predicted, least, measured and unplanned bytes above what is resident.
        curve: the plans that were found, in bytes above what is resident.
    """
    constants = sum(constant_bytes(item.program) for item in planned)
    base = session.resident.total + constants
    # What the model takes by itself: without the weights that a rewrite of its inference program folded.
    own = sum(constant_bytes(item.program if item.program.training else item.source) for item in planned)
    own += session.resident.total
    largest = max(range(len(planned)), key=lambda i: planned[i].timeline.peak_bytes)
    item = planned[largest]
    breakdown = breakdown_of(session, item.program, item.timeline, constants, peak)
    optimizer_peak = session.optimizer_peak()
    programs = tuple(_program_report(session, number, item, base) for number, item in enumerate(planned))
    smallest = max(base + minimum, optimizer_peak)
    whole_curve = _whole_curve(curve, peak, base, optimizer_peak)
    executables = session.executables
    if not executables and session.engine().measures and measured is not None and not item.program.training:
        executables = (_measured_executable(programs[largest].name, item.program, measured),)
    return Report(
        passes=tuple(
            dataclasses.replace(record, program=number)
            for number, item in enumerate(planned)
            for record in item.records
        ),
        peak_bytes=max(base + peak, optimizer_peak),
        measured_peak_bytes=None if measured is None else max(base + measured, optimizer_peak),
        minimum_bytes=with_slack(smallest, session.resident.device),
        budget_bytes=None if session.soft else session.limit(own + plain),
        unconstrained_bytes=max(own + plain, optimizer_peak),
        breakdown=breakdown,
        programs=programs,
        notes=tuple(session.notes),
        environment=Environment(str(torch.__version__), _device_name(session, item.program), torch.get_num_threads()),
        model=session.model_name,
        backend=session.engine().name,
        executables=executables
        or tuple(
            _arena_executable(report.name, report.arena, item.program)
            for report, item in zip(programs, planned, strict=True)
            if report.arena is not None
        ),
        curve=whole_curve,
        minimum_is_a_bound=any(point.bytes < smallest for point in whole_curve),
    )


def put_on_record(planned: Iterable[Planned]) -> None:
    """Put a step's graphs on record ahead of its report, which takes most of its time for that, and finds them then."""
    for item in planned:
        _graphs(item)


def _whole_curve(curve: Sequence[CurvePoint], peak: int, base: int, floor: int) -> tuple[CurvePoint, ...]:
    """The curve in bytes of the whole step, moved so that the chosen plan takes `peak` bytes above `base`."""
    moved = peak - sum(point.bytes for point in curve if point.chosen)
    return monotone(dataclasses.replace(point, bytes=max(base, base + point.bytes + moved, floor)) for point in curve)


def breakdown_of(session: Session, program: Program, line: Timeline, constants: int, peak: int) -> MemoryBreakdown:
    """Where the bytes go at the step's peak: while the model's graphs run, or while none does if that is more."""
    resident = session.resident
    base = resident.total + constants
    if session.optimizer_peak() > base + peak:
        gradients, scratch = resident.trainable, resident.beside_gradients
        buffers, total = resident.buffers, session.optimizer_peak()
        held = resident.total - resident.gradients - resident.outside + resident.coming_beside
        activations = max(0, total - held - gradients - scratch)  # a loss, or what the loop holds
    else:
        # An engine's own code may take less than the operations one by one.
        gradients = min(peak, line.gradient_bytes_at_peak)
        scratch = min(peak - gradients, line.workspace_bytes[line.peak_step] if line.steps else 0)
        activations = peak - gradients - scratch + resident.outside
        gradients += resident.gradients
        buffers, total = resident.buffers + constants, base + peak
    return MemoryBreakdown(
        parameters=resident.parameters,
        buffers=buffers,
        gradients=gradients,
        optimizer_state=resident.optimizer_state,
        inputs=resident.inputs,
        activations=activations,
        workspace=scratch + resident.libraries,
        total=total,
        largest=largest_tensors(program, line),
        others=resident.others,
    )


def largest_tensors(program: Program, line: Timeline) -> tuple[TensorAtPeak, ...]:
    """The largest tensors that the step itself made and that are alive at its peak."""
    nodes = {node.name: node for node in program.graph.nodes}
    found = []
    for name, size in line.live_at_peak[:_LARGEST]:
        node = nodes[name]
        value = _storage_owner(node, size)
        found.append(
            TensorAtPeak(
                name,
                size,
                tuple(value.shape) if value is not None else (),
                str(value.dtype).removeprefix("torch.") if value is not None else "",
                source_line(node),
            )
        )
    return tuple(found)


def _storage_owner(node: fx.Node, size: int) -> torch.Tensor | None:
    tensors = tensors_of(node)
    exact = [t for t in tensors if allocated_bytes(t.untyped_storage().nbytes(), t.device) == size]
    return next(iter(exact or tensors), None)


def _program_report(session: Session, number: int, item: Planned, base: int) -> ProgramReport:
    program = item.program
    saved, recomputed = _tensor_rows(item) if program.training else ((), ())
    before, after = _graphs(item)
    return ProgramReport(
        name=f"graph {number}",
        kind="training" if program.training else "inference",
        nodes=len(program.calls),
        timeline_before=tuple(base + live for live in item.timeline_before.live_bytes),
        timeline_after=tuple(base + live for live in item.timeline.live_bytes),
        saved=saved,
        recomputed=recomputed,
        forward_steps=item.timeline.forward_steps,
        before=before,
        after=after,
        arena=_arena(session, program),
        seconds_before=_seconds(session, item, item.before, item.timeline_before, before),
        seconds_after=_seconds(session, item, program, item.timeline, after),
    )


def _seconds(
    session: Session, item: Planned, program: Program, line: Timeline, record: GraphRecord | None
) -> tuple[float, ...]:
    """What each step of a timeline takes, in seconds: as measured, else estimated; nothing where that is not known.

    Args:
        session: whose step it is.
        item: the planned graph.
        program: what most of the steps are nodes of.
        line: the timeline.
        record: the graph that the timeline is of.
    """
    if record is None or not program.calls:
        return ()
    calls = {node.name: node for node in program.calls}
    targets = {node.name: node.target for node in item.before.calls}
    device = session.table.device(program.calls[0])
    found, worked = list[float | None](), [0.0, 0]  # seconds of products, and their operations
    for step in record.steps:
        node, taken = calls.get(step.name), None
        if node is not None:
            original = node.meta.get("recomputes", node.name)
            # A pass may have given the name to another operator, or write in place.
            cost = None if targets.get(original) == node.target else session.table.known(node)
            cost = cost or item.costs.get(original)
            taken = roofline.seconds(node, device) if cost is None else cost.seconds
            if step.flops:
                worked = [worked[0] + taken, worked[1] + step.flops]
        found.append(taken)
    rate = worked[0] / worked[1] if worked[1] else 0.0  # of one operation
    for at, step in enumerate(record.steps):
        if found[at] is None:  # of what later rewrites replaced
            found[at] = max(roofline.moving_seconds(step.moved, device) if step.moved else 0.0, rate * step.flops)
    return tuple(float(f"{taken:.3g}") for taken in found if taken is not None)


def _graphs(item: Planned) -> tuple[GraphRecord | None, GraphRecord | None]:
    """The graphs before the plan, and after it."""
    before = _graph(item.timeline_before, item.before, item.records)
    return before, _graph(item.timeline, item.program, item.records)


def _graph(line: Timeline, program: Program, records: Sequence[PassRecord]) -> GraphRecord | None:
    """The record of the graph that a timeline is of: the program, or one of those that passes saw."""
    recorded = [graph for record in records for graph in (record.before, record.after) if graph is not None]
    if line.steps == tuple(node.name for node in program.calls if node.target is not operator.getitem):
        names = [node.name for node in program.graph.nodes]
        known = [graph for graph in recorded if [node.name for node in graph.nodes] == names]
        return snapshot(program, known[-1:])
    same = [graph for graph in recorded if tuple(node.name for node in graph.steps) == line.steps]
    return same[-1] if same else None


def _arena(session: Session, program: Program) -> ArenaReport | None:
    plan = None if program.training else session.engine().buffer_plan(program)
    if plan is None:
        return None
    blocks = sorted(plan.blocks, key=lambda block: (block.start, block.offset, block.name))
    return ArenaReport(
        plan.arena_bytes,
        plan.lower_bound,
        plan.steps,
        tuple(
            ArenaBlock(
                block.name, block.home.value, block.nbytes, block.start, block.end, block.offset, block.holds,
                block.scratch,
            )
            for block in blocks
        ),
    )  # fmt: skip


def _arena_executable(name: str, arena: ArenaReport, program: Program) -> ExecutableReport:
    """What a call takes whose values live in an arena, and beside it where operators allocate for themselves."""
    results = sum(block.bytes for block in arena.blocks if block.home == "output")
    own = [block for block in arena.blocks if block.home == "operator"]
    beside = max((sum(b.bytes for b in own if b.start <= block.start < b.end) for block in own), default=0)
    return ExecutableReport(name, _argument_bytes(program), results, arena.bytes + beside)


def _measured_executable(name: str, program: Program, measured: int) -> ExecutableReport:
    """What a call took of which only the whole could be measured, in bytes above what is resident."""
    aliasing = analyse(program)
    nodes = [node for node in program.output_nodes if isinstance(node, fx.Node)]
    made = [aliasing.storages[index] for index in {index for node in nodes for index in aliasing.of[node]}]
    results = min(measured, sum(storage.nbytes for storage in made if storage.producer.op != "placeholder"))
    return ExecutableReport(name, _argument_bytes(program), results, measured - results)


def _argument_bytes(program: Program) -> int:
    return sum(storage.nbytes for storage in analyse(program).storages if storage.producer.op == "placeholder")


def _tensor_rows(item: Planned) -> tuple[tuple[TensorRow, ...], tuple[TensorRow, ...]]:
    """What is kept from forward to backward, and what backward recomputes: by storage, largest first."""
    program = item.program
    aliasing = analyse(program)
    life = lifetimes(program, aliasing)
    saved: list[TensorRow] = []
    recomputed: dict[str, TensorRow] = {}
    for storage, span in zip(aliasing.storages, life.spans, strict=True):
        if span is not None and span[0] < life.forward_steps < span[1]:
            saved.append(_row(item, storage.producer, storage.producer.name, storage.nbytes))
    for node in program.calls:
        again = node.meta.get("recomputes")
        if again is not None and ("inplace" in node.meta or aliasing.created_by(node)):
            size = sum(aliasing.storages[index].nbytes for index in aliasing.of[node])
            recomputed.setdefault(again, _row(item, node, again, size))
    return _largest_first(saved), _largest_first(recomputed.values())


def _row(item: Planned, node: fx.Node, name: str, size: int) -> TensorRow:
    cost = item.costs.get(name)
    return TensorRow(name, size, source_line(node), cost.seconds if cost else None)


def _largest_first(rows: Iterable[TensorRow]) -> tuple[TensorRow, ...]:
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _device_name(session: Session, program: Program) -> str:
    if session.table.target is not None:
        return f"{session.table.target.title} (times estimated)"
    for node in program.graph.nodes:
        for tensor in tensors_of(node):
            if tensor.device.type == "cuda":
                return str(torch.cuda.get_device_name(tensor.device))
    return "cpu"
