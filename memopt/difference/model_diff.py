"""What changed between two models, two ONNX files or two reports: figures, operators, and nodes side by side."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memopt.budget import format_bytes
from memopt.difference.graph_diff import Alignment, GraphNode, align
from memopt.difference.program_nodes import graph_nodes
from memopt.difference.unified import unified
from memopt.memory.breakdown import align as align_columns
from memopt.memory.timeline import timeline
from memopt.program import Program
from memopt.report.record import Report

if TYPE_CHECKING:
    import onnx_ir as ir

_WEIGHTS = ("parameter", "buffer", "constant", "initializer")


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of both sides.

    Attributes:
        name: what it is.
        before, after: None where it is not known.
        is_bytes: whether it is a number of bytes.
    """

    name: str
    before: int | None
    after: int | None
    is_bytes: bool = True

    def words(self, value: int | None) -> str:
        """One of the two values in words."""
        if value is None:
            return "-"
        return format_bytes(value) if self.is_bytes else f"{value:,}"


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two things that are compared.

    Attributes:
        title: its name.
        graphs: its graphs, each in order of execution.
        figures: by name; sizes are bytes, all others counts.
        counts: names of the figures that are counts.
    """

    title: str
    graphs: tuple[tuple[GraphNode, ...], ...]
    figures: dict[str, int | None]
    counts: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class ModelDiff:
    """Two sides, compared.

    Attributes:
        before, after: their titles.
        figures: what each takes.
        graphs: one alignment per pair of graphs; a graph that the other side lacks is aligned with none.
    """

    before: str
    after: str
    figures: tuple[Figure, ...]
    graphs: tuple[Alignment, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing but names and modules differs."""
        return all(graph.equal for graph in self.graphs) and all(row.before == row.after for row in self.figures)

    def to_text(self, context: int = 3, *, summary: bool = False) -> str:
        """Figures, operators whose number differs, and the graphs as a unified diff; it ends with a newline.

        Args:
            context: lines around each change.
            summary: leave the unified diff out.
        """
        lines = [f"{self.before} → {self.after}"]
        rows = [
            ("", "before", "after"),
            *((row.name, row.words(row.before), row.words(row.after)) for row in self.figures),
        ]
        lines += align_columns(rows)
        for index, graph in enumerate(self.graphs):
            name = f"graph {index}: " if len(self.graphs) > 1 else ""
            counts = ", ".join(f"{count} {kind}" for kind, count in graph.counts().items() if count)
            lines += ["", f"{name}{counts or 'the same nodes'}"]
            operators = [(f"  {kind}", str(old), str(new)) for kind, old, new in graph.by_operator()]
            lines += align_columns(operators)
        text = "\n".join(lines) + "\n"
        if not summary:
            text += "".join(
                f"\n{found}"
                for index, graph in enumerate(self.graphs)
                if (found := unified(graph, *self._titles(index), context))
            )
        return text

    def _titles(self, index: int) -> tuple[str, str]:
        suffix = f" graph {index}" if len(self.graphs) > 1 else ""
        return self.before + suffix, self.after + suffix

    def to_json(self) -> str:
        """Figures, and every node that is not the same, ending with a newline."""
        content = {
            "format": "memopt diff",
            "version": 1,
            "before": self.before,
            "after": self.after,
            "equal": self.equal,
            "figures": [dataclasses.asdict(row) for row in self.figures],
            "graphs": [_plain(graph) for graph in self.graphs],
        }
        return json.dumps(content, indent=1) + "\n"

    def to_html(self, context: int = 3) -> str:
        """One self-contained page."""
        from memopt.report.diff_page import to_html

        return to_html(self, context)


def compare_sides(before: Side, after: Side) -> ModelDiff:
    """Compare two sides: figures by name, graphs in order."""
    names = list(dict.fromkeys((*before.figures, *after.figures)))
    counts = before.counts | after.counts
    figures = tuple(
        Figure(name, before.figures.get(name), after.figures.get(name), name not in counts) for name in names
    )
    pairs = itertools.zip_longest(before.graphs, after.graphs, fillvalue=())
    return ModelDiff(before.title, after.title, figures, tuple(align(old, new) for old, new in pairs))


def side_of_programs(title: str, programs: Sequence[Program]) -> Side:
    """The captured graphs of a model; values of parameters, buffers and constants count too."""
    graphs = tuple(tuple(graph_nodes(program, values=True)) for program in programs)
    figures = _of_graphs(graphs)
    figures["activations at the peak"] = max((timeline(program).peak_bytes for program in programs), default=0)
    return Side(title, graphs, figures, frozenset(("nodes",)))


def side_of_onnx(title: str, model: ir.Model) -> Side:
    """A prepared ONNX model; values of initializers count too."""
    from memopt.onnx.nodes import graph_nodes as onnx_nodes
    from memopt.onnx.read import opset

    graphs = (tuple(onnx_nodes(model, values=True)),)
    figures = {**_of_graphs(graphs), "operator set": opset(model)}
    return Side(title, graphs, figures, frozenset(("nodes", "operator set")))


def side_of_report(title: str, report: Report) -> Side:
    """What a compilation made: its figures, and its graphs as they are executed."""
    records = [program.after for program in report.programs if program.after is not None]
    graphs = tuple(tuple(node.as_graph_node() for node in record.nodes) for record in records)
    figures: dict[str, int | None] = {
        "nodes": sum(program.nodes for program in report.programs),
        "without a plan": report.unconstrained_bytes,
        "budget": report.budget_bytes,
        "predicted peak": report.peak_bytes,
        "measured peak": report.measured_peak_bytes,
        "least possible": report.minimum_bytes,
    }
    for name, value in report.breakdown.headings():
        figures[name] = value
    for record in report.passes:
        key = f"changes by {record.name}"
        figures[key] = (figures.get(key) or 0) + len(record.changes)
    counts = frozenset(name for name in figures if name == "nodes" or name.startswith("changes by "))
    return Side(title, graphs, figures, counts)


def _of_graphs(graphs: Sequence[Sequence[GraphNode]]) -> dict[str, int | None]:
    nodes = [node for graph in graphs for node in graph]
    weights = sum(node.bytes for node in nodes if node.operator in _WEIGHTS)
    results = sum(node.bytes for node in nodes if node.operator not in (*_WEIGHTS, "input"))
    calls = sum(node.operator not in (*_WEIGHTS, "input", "tangent", "output") for node in nodes)
    return {"nodes": calls, "weights": weights, **({"all results together": results} if results else {})}


def _plain(graph: Alignment) -> dict[str, Any]:
    rows = []
    for row in graph.rows:
        if row.kind != "same":
            old = None if row.before is None else dataclasses.asdict(graph.before[row.before])
            new = None if row.after is None else dataclasses.asdict(graph.after[row.after])
            rows.append({"kind": row.kind, "why": row.why, "before": old, "after": new})
    return {
        "counts": graph.counts(),
        "operators": [{"operator": kind, "before": old, "after": new} for kind, old, new in graph.by_operator()],
        "changes": rows,
    }
