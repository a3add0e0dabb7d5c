"""Planned: one graph of a step with its rewrites, its memory and its costs; and the peak of several together."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from memopt.memory.cost.table import OperatorCost
from memopt.memory.rounding import allocated_bytes
from memopt.memory.timeline import Timeline
from memopt.pass_manager import PassRecord
from memopt.program import InputKind, Program, describe, tensors_of
from memopt.step.graph_peaks import peaks_of, step_peak
from memopt.step.planner import Choice

# Programs are never edited, and are asked for their fingerprints at each try to plan them.
_FINGERPRINTS: WeakKeyDictionary[Program, str] = WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Planned:
    """One graph after planning.

    Attributes:
        source: the program as captured.
        before: the same after the rewrites that come before the plan.
        program: the finished program.
        timeline: its memory.
        timeline_before: the memory of `before`.
        records: one per pass.
        costs: seconds and workspace by node name of `before`.
        choice: the plan; None for inference, and where `checkpoint` is not among the passes.
        measured: what a trial run took above what is resident, in bytes; None when none was made.
        failure: why a trial run failed, in one line; empty when none did.
        ran_out: whether it failed for lack of memory.
    """

    source: Program
    before: Program
    program: Program
    timeline: Timeline
    timeline_before: Timeline
    records: tuple[PassRecord, ...]
    costs: Mapping[str, OperatorCost]
    choice: Choice | None = None
    measured: int | None = None
    failure: str = ""
    ran_out: bool = False


def predicted_peak(planned: Sequence[Planned]) -> int:
    """The peak in bytes of a step above what is resident, as the programs' own operations take them."""
    return step_peak([peaks_of(item.program, item.timeline) for item in planned])


def measured_peak(planned: Sequence[Planned], default: int) -> int:
    """The same with each graph's own peak measured; `default` where one was not."""
    peaks = []
    for item in planned:
        if item.measured is None:
            return default
        figures = peaks_of(item.program, item.timeline)
        excess = item.measured - item.timeline.peak_bytes
        peaks.append(dataclasses.replace(figures, forward=figures.forward + excess, backward=figures.backward + excess))
    return step_peak(peaks)


def constant_bytes(program: Program) -> int:
    """Bytes of the constants that the program itself owns: those that alias no parameter or buffer."""
    known = {
        program.state[entry.name].untyped_storage().data_ptr()
        for entry in program.inputs
        if entry.kind in (InputKind.PARAMETER, InputKind.BUFFER) and entry.name in program.state
    }
    own: dict[int, int] = {}
    for entry, node in zip(program.inputs, program.placeholders, strict=True):
        if entry.kind is InputKind.CONSTANT:
            storage = program.state[entry.name].untyped_storage()
            if storage.data_ptr() not in known:
                own[storage.data_ptr()] = allocated_bytes(storage.nbytes(), node.meta["val"].device)
    return sum(own.values())


def fingerprint(program: Program) -> str:
    """A digest of the graph: operators, arguments, shapes, strides, dtypes and devices."""
    if program not in _FINGERPRINTS:
        _FINGERPRINTS[program] = _digest(program)
    return _FINGERPRINTS[program]


def _digest(program: Program) -> str:
    digest = hashlib.sha256()
    for node in program.graph.nodes:
        values = [describe(tensor) for tensor in tensors_of(node)] if node.op == "placeholder" else []
        digest.update(f"{node.name}|{node.target}|{node.args}|{node.kwargs}|{values}\n".encode())
    handed = [number for number, output in enumerate(program.outputs) if output.handed]
    if handed:
        digest.update(f"handed over: {handed}\n".encode())
    let_go = [number for number, output in enumerate(program.outputs) if output.let_go]
    if let_go:
        digest.update(f"let go of: {let_go}\n".encode())
    return digest.hexdigest()
