"""Report: what one compilation did, predicted and measured, as plain data."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from memopt.graph.record import GraphRecord
from memopt.memory.breakdown import MemoryBreakdown
from memopt.pass_manager import PassRecord
from memopt.step.curve import CurvePoint


@dataclasses.dataclass(frozen=True)
class Environment:
    """What the report's figures were taken on."""

    torch: str
    device: str
    threads: int


@dataclasses.dataclass(frozen=True)
class TensorRow:
    """One tensor that backward needs: kept, or recomputed.

    Attributes:
        name: the node that makes it.
        bytes: of its storage.
        source: the user's source line as `file:line, code`; empty when it is not known.
        seconds: the estimated time to compute it once more; None when it was not estimated.
    """

    name: str
    bytes: int
    source: str = ""
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class ArenaBlock:
    """Memory of a program in one arena that is taken and given back as one.

    Attributes:
        name: the node that needs it first.
        home: "arena"; "output": a fresh tensor at every call; "operator": allocated by the operator itself.
        bytes: its size.
        start, end: the half-open span of steps in which it is in use.
        offset: its first byte in the arena; 0 for other homes.
        holds: names of the nodes whose results lie in it.
        scratch: whether it holds no result, and is needed only while its node runs.
    """

    name: str
    home: Literal["arena", "output", "operator"]
    bytes: int
    start: int
    end: int
    offset: int
    holds: tuple[str, ...]
    scratch: bool


@dataclasses.dataclass(frozen=True)
class ArenaReport:
    """Where the values of an inference program live.

    Attributes:
        bytes: of the arena.
        lower_bound: no placement of these blocks takes less.
        steps: names of the nodes that run, in order.
        blocks: in order of time.
    """

    bytes: int
    lower_bound: int
    steps: tuple[str, ...]
    blocks: tuple[ArenaBlock, ...]


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """One captured graph.

    Attributes:
        name: tells the graphs of one model apart.
        kind: whether the graph holds backward as well.
        nodes: call nodes after all passes.
        timeline_before: bytes on the device at each step before the plan, all that is resident included.
        timeline_after: the same for what is executed.
        saved: the tensors that cross from forward to backward, largest first.
        recomputed: the tensors that backward recomputes, largest first.
        forward_steps: how many leading steps of `timeline_after` are forward.
        before: the graph that `timeline_before` is of; its storages say what is alive at each step.
        after: the graph that is executed.
        arena: where its values live, for an engine that plans that.
        seconds_before, seconds_after: what each step of the timelines takes, as its operator was measured or estimated;
            empty where it is not known which operators they are.
    """

    name: str
    kind: Literal["inference", "training"]
    nodes: int
    timeline_before: tuple[int, ...] = ()
    timeline_after: tuple[int, ...] = ()
    saved: tuple[TensorRow, ...] = ()
    recomputed: tuple[TensorRow, ...] = ()
    forward_steps: int = 0
    before: GraphRecord | None = dataclasses.field(default=None, repr=False)
    after: GraphRecord | None = dataclasses.field(default=None, repr=False)
    arena: ArenaReport | None = dataclasses.field(default=None, repr=False)
    seconds_before: tuple[float, ...] = dataclasses.field(default=(), repr=False, metadata={"later": True})
    seconds_after: tuple[float, ...] = dataclasses.field(default=(), repr=False, metadata={"later": True})


@dataclasses.dataclass(frozen=True)
class ExecutableReport:
    """What one executable of an engine takes while it runs, in bytes.

    By XLA's own analysis; of `static` by the plan of its arena; of ONNX Runtime under a budget by measurement.

    Attributes:
        name: which graph, graph and piece it is.
        arguments: of its arguments, weights included.
        outputs: of its results.
        temporaries: of everything between.
    """

    name: str
    arguments: int
    outputs: int
    temporaries: int

    @property
    def peak(self) -> int:
        """All of it together."""
        return self.arguments + self.outputs + self.temporaries


@dataclasses.dataclass(frozen=True)
class Report:
    """What one compilation did. All sizes are bytes on the device, whole step, everything resident included.

    Attributes:
        passes: one record per pass and program, in order.
        peak_bytes: the predicted peak of a step.
        measured_peak_bytes: the measured peak; None before a step was measured.
        minimum_bytes: the minimum that is known to be kept; None when it was not computed. Where an engine's
            own code decides, it is known of code that was made, not of plans.
        budget_bytes: the limit that was asked for; None without one.
        unconstrained_bytes: the predicted peak without a budget.
        breakdown: where the bytes of the predicted peak go.
        programs: one entry per captured graph.
        notes: what the user should know, one line each (a fallback, say).
        environment: what the figures were taken on.
        model: the model's class or name.
        backend: the engine that runs the programs.
        curve: what more or less memory would cost, falling in bytes and rising in seconds; the plan that was taken is
            marked. Empty for inference, and where nothing was planned.
        executables: what an engine says that each of its executables takes, in the order in which they run.
        seconds: wall time of planning and compiling, by what was done; the model's own tracing by Dynamo is not in it.
        minimum_is_a_bound: whether a plan of the curve is predicted to take less than the minimum.
    """

    passes: tuple[PassRecord, ...]
    peak_bytes: int
    measured_peak_bytes: int | None
    minimum_bytes: int | None
    budget_bytes: int | None
    unconstrained_bytes: int
    breakdown: MemoryBreakdown
    programs: tuple[ProgramReport, ...]
    notes: tuple[str, ...]
    environment: Environment
    model: str = ""
    backend: str = ""
    curve: tuple[CurvePoint, ...] = ()
    executables: tuple[ExecutableReport, ...] = ()
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    minimum_is_a_bound: bool = dataclasses.field(default=False, metadata={"later": True})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, as one self-contained HTML page or as text, by the path's suffix.

        The file is written whole or not at all; an existing one is replaced.

        Raises:
            ValueError: the suffix is none of .json, .html and .txt.
            OSError: the file cannot be written.
        """
        from memopt.report.files import render, write_whole

        suffix = Path(path).suffix.lower()
        if suffix not in (".json", ".html", ".txt"):
            raise ValueError(f"cannot save a report as {Path(path).name!r}: the name must end in .json, .html or .txt")
        write_whole(path, render(self, suffix.removeprefix(".")))

    def __str__(self) -> str:
        """The report as text."""
        from memopt.report.text import to_text

        return to_text(self)
