"""The record of one conversion, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from memopt.budget import format_bytes
from memopt.convert.measure import Cost
from memopt.convert.verify import Run
from memopt.onnx.manager import OnnxPassRecord
from memopt.report.json_format import document_of, dumps, parsed, record_of

SCHEMA = "memopt-conversion"
VERSION = 2

# Said once in every record: see `memopt.convert.rewriting.COUNTERPARTS`.
PASSES_ON = "passes on the ONNX graph, whose sizes may vary; each of memopt.INFERENCE has its counterpart there"


@dataclasses.dataclass(frozen=True)
class Signature:
    """An input or output of the ONNX graph: sizes that vary by their label."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What was converted, into what, and how it was proved.

    Attributes:
        source: what was converted.
        output: the file's name; None where nothing was written.
        opset: of the standard operators.
        target: "standard", or the engine whose own operators may be among the nodes.
        inputs, outputs: of the graph.
        nodes_before, nodes_after: by operator, as exported and as written.
        bytes_before: of the graph as exported or read, in bytes, and of the weights beside it.
        bytes_after: of the file and of the weights beside it, in bytes.
        passes: what each pass did and did not do.
        runs: the comparison with the source; none where the output is the source as it was.
        allowed: the share of an output's largest value that lower precision may change; 0.0: rounding only.
        notes: what could not be had, one line each.
        seconds: wall time of the steps.
        cost_before, cost_after: what a run takes, at the sizes of the first run.
    """

    source: str
    output: str | None
    opset: int
    target: str
    inputs: tuple[Signature, ...]
    outputs: tuple[Signature, ...]
    nodes_before: Mapping[str, int]
    nodes_after: Mapping[str, int]
    bytes_before: int
    bytes_after: int
    passes: tuple[OnnxPassRecord, ...]
    runs: tuple[Run, ...]
    notes: tuple[str, ...]
    seconds: Mapping[str, float]
    allowed: float = 0.0
    cost_before: Cost = dataclasses.field(default_factory=Cost)
    cost_after: Cost = dataclasses.field(default_factory=Cost)

    def to_text(self, *, explain: bool = False) -> str:
        """A few lines for people, ending with a newline; with `explain` every refusal, with its node."""
        for_whom = "" if self.target == "standard" else f", for {self.target}"
        lines = [f"{self.source} → {self.output or 'nothing written'} (opset {self.opset}{for_whom})"]
        for title, entries in (("inputs", self.inputs), ("outputs", self.outputs)):
            lines.append(f"{title:9}" + ", ".join(_shown(entry) for entry in entries))
        lines += ["", *self._table(), ""]
        changed = [item for item in self.passes if item.changes]
        if changed:
            lines.append(PASSES_ON)
        lines += [f"pass {item.name}: {_counted(item)}" for item in changed]
        if explain:
            lines += [f"{item.name}: {entry.node}: {entry.reason}" for item in self.passes for entry in item.refusals]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join((*lines, self._proof())) + "\n"

    def _table(self) -> list[str]:
        rows = [("", "before", "after")]
        rows.append(("nodes", str(sum(self.nodes_before.values())), str(sum(self.nodes_after.values()))))
        changed = sorted(
            {*self.nodes_before, *self.nodes_after},
            key=lambda kind: (-max(self.nodes_before.get(kind, 0), self.nodes_after.get(kind, 0)), kind),
        )
        rows += [
            (f"  {kind}", str(self.nodes_before.get(kind, 0)), str(self.nodes_after.get(kind, 0))) for kind in changed
        ]
        rows += self.sizes_and_times()
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return [f"{row[0]:{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}" for row in rows]

    def sizes_and_times(self) -> list[tuple[str, str, str]]:
        """The rows of the table that say what the file takes: on the disk, in memory, in time."""
        old, new = self.cost_before, self.cost_after
        rows = [("file", format_bytes(self.bytes_before), format_bytes(self.bytes_after))]
        for title, before, after in (
            ("peak, estimated", old.estimated_bytes, new.estimated_bytes),
            ("peak, measured", old.peak_bytes, new.peak_bytes),
        ):
            if before is not None or after is not None:
                rows.append((title, _bytes(before), _bytes(after)))
        if old.seconds is not None and new.seconds is not None:
            rows.append(("latency on this CPU", f"{1000 * old.seconds:.3g} ms", f"{1000 * new.seconds:.3g} ms"))
        return rows

    def _proof(self) -> str:
        if not self.runs:
            return "equal to the source: it is the source"
        outputs = [output for run in self.runs for output in run.outputs]
        worst = max((output.max_relative for output in outputs), default=0.0)
        sizes = "; ".join(", ".join(f"{label} {size}" for label, size in run.sizes.items()) for run in self.runs)
        where = f" ({sizes})" if sizes.strip("; ") else ""
        verdict = f"within {100 * self.allowed:.2g} % of" if self.allowed else "equal to"
        count = f"{len(self.runs)} runs{where}"
        return f"{verdict} the source in {count}: largest difference {worst:.1e} of the largest value"

    def to_json(self) -> str:
        """The whole record as JSON, ending with a newline: docs/report_schema.md describes it."""
        return dumps(document_of(self, SCHEMA, VERSION))


def from_json(text: str) -> Conversion:
    """Read `Conversion.to_json`'s text back.

    Raises:
        ValueError: not JSON, no record of a conversion, or one of a version that is not known.
    """
    return record_of(parsed(text), Conversion, SCHEMA, VERSION)


def load(path: str | os.PathLike[str]) -> Conversion:
    """Read the record of a conversion that was saved as JSON.

    Raises:
        ValueError: the file is none, or of a version that is not known.
        OSError: the file cannot be read.
    """
    try:
        return from_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _bytes(size: int | None) -> str:
    return "unknown" if size is None else format_bytes(size)


def _counted(item: OnnxPassRecord) -> str:
    return f"{len(item.changes)} changes, {item.nodes_before} → {item.nodes_after} nodes"


def signature(value: ir.Value) -> Signature:
    """The signature of a graph's input or output."""
    shape: tuple[int | str, ...] = ()
    if value.shape is not None:
        shape = tuple(size if isinstance(size, int) else str(size.value or "?") for size in value.shape)
    return Signature(value.name or "", "unknown" if value.dtype is None else value.dtype.name.lower(), shape)


def count_nodes(model: ir.Model) -> dict[str, int]:
    """Nodes by operator, those of subgraphs included."""
    counted = Counter(node.op_type for node in model.graph.all_nodes())
    return dict(sorted(counted.items()))


def _shown(entry: Signature) -> str:
    return f"{entry.name} {entry.dtype}[{', '.join(map(str, entry.shape))}]"
