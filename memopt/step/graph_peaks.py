"""What the graphs of a training step hold, each by itself and all together: the peak that a limit is of."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from contextvars import ContextVar

from torch import fx

from memopt.common.scoped import scoped
from memopt.memory.rounding import allocated_bytes
from memopt.memory.timeline import Timeline
from memopt.program import InputKind, OutputKind, Program
from memopt.solve.phase_peaks import PhasePeaks, phase_peaks
from memopt.solve.schedule import Schedule
from memopt.step.encode_step import Lowering


@dataclasses.dataclass(frozen=True)
class GraphPeaks:
    """What one graph of a step holds, in bytes above what is resident.

    Attributes:
        forward: the most during its forward graph.
        backward: the most during its backward graph, its saved tensors included.
        saved: alive between forward and backward: saved tensors, and outputs that the caller holds.
        left: alive after backward: gradients of parameters, and outputs that the caller holds.
        gradients: of these, by the parameter's name: what another graph adds to the same gradient takes no more.
        alone: the most in backward as eager runs it, where of the outputs the scalars alone get gradients; None where
            the others need none, or that is not known.
    """

    forward: int
    backward: int
    saved: int
    left: int
    gradients: tuple[tuple[str, int], ...] = ()
    alone: int | None = None


# What eager regions between the graphs of the step that is being planned hold, in bytes: at most; while forward runs.
_between: ContextVar[tuple[int, int]] = ContextVar("bytes between graphs", default=(0, 0))


def between_graphs(size: int, forward: int = 0) -> contextlib.AbstractContextManager[None]:
    """Within: `step_peak` is of a step beside whose graphs something else is held.

    Args:
        size: bytes that eager regions peak at between its graphs, the caller's loss among them.
        forward: bytes that are there while forward runs, as outputs of the step before that the caller holds.
    """
    return scoped(_between, (size, forward))


def held_beside() -> tuple[int, int]:
    """Bytes that are held beside graphs now: what `between_graphs` was given."""
    return _between.get()


def step_peak(graphs: Sequence[GraphPeaks]) -> int:
    """The most bytes during a step that runs the graphs forward in order and backward in reverse order.

    Eager regions (`between_graphs`) run beside what the graphs save, and not beside what they need while they run.
    """
    between, beside = _between.get()
    held = sum(graph.saved for graph in graphs)
    peak, left = held + between if between else 0, 0
    there: set[str] = set()
    for number in reversed(range(len(graphs))):
        graph = graphs[number]
        held -= graph.saved
        peak = max(peak, held + graph.forward + beside, held + graph.backward + left)
        if number:  # what the first graph leaves is there when the step has ended
            left += graph.left - sum(size for name, size in graph.gradients if name in there)
            there.update(name for name, _ in graph.gradients)
    return peak


def peaks_of(program: Program, timeline: Timeline) -> GraphPeaks:
    """The peaks of a training program from its timeline."""
    cut = timeline.forward_steps
    return GraphPeaks(
        forward=max(timeline.live_bytes[:cut], default=0),
        backward=max(timeline.live_bytes[cut:], default=0),
        saved=timeline.saved_bytes,
        left=_left_bytes(program, timeline.end_bytes),
        gradients=gradients_of(program),
    )


def gradients_of(program: Program) -> tuple[tuple[str, int], ...]:
    """The gradients of parameters that a training program leaves: qualified names, and bytes."""
    parameters = {entry.name: entry for entry in program.inputs if entry.kind is InputKind.PARAMETER}
    found = {}
    for output, value in zip(program.outputs, program.output_nodes, strict=True):
        entry = parameters.get(output.target or "") if output.kind is OutputKind.GRADIENT else None
        if entry is not None and entry.target is not None and value is not None:
            found[entry.target] = _bytes(value) if entry.shard_bytes is None else entry.shard_bytes
    return tuple(found.items())


def scheduled_peaks(program: Program, lowering: Lowering, schedule: Schedule) -> GraphPeaks:
    """The peaks of a training program that follows a schedule, as the problem's numbers tell them.

    Where kernels are generated they write over what they read last, which the search does not know.
    """
    (found,) = graph_peaks(program, lowering, [phase_peaks(lowering.problem, schedule, lowering.kernels)])
    return found


def graph_peaks(program: Program, lowering: Lowering, phases: Sequence[PhasePeaks]) -> list[GraphPeaks]:
    """The peaks of a training program by several schedules, of which each takes such graphs."""
    left = _left_bytes(program, sum(lowering.problem.sizes[s] for s in lowering.problem.pinned))
    gradients = gradients_of(program)
    return [GraphPeaks(phase.forward, phase.backward, phase.saved, left, gradients) for phase in phases]


def _left_bytes(program: Program, end_bytes: int) -> int:
    """Of the bytes at the end of backward, those that stay: a user input's gradient is another graph's tangent.

    Of the gradient of a parameter that is sharded a shard stays.
    """
    entries = {entry.name: entry for entry in program.inputs}
    passed_on = 0
    for output, value in zip(program.outputs, program.output_nodes, strict=True):
        entry = entries.get(output.target or "") if output.kind is OutputKind.GRADIENT else None
        if entry is None or value is None or value.meta["val"] is None:
            continue
        if entry.kind is InputKind.USER or entry.shard_bytes is not None:
            passed_on += _bytes(value) - (entry.shard_bytes or 0)
    return max(0, end_bytes - passed_on)


def _bytes(value: fx.Node) -> int:
    fake = value.meta["val"]
    return allocated_bytes(fake.numel() * fake.element_size(), fake.device)
