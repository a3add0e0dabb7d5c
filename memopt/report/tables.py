"""Graphs as tables: every string, every node and every graph of a report is written once, and referred to by place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from memopt.graph.record import GraphRecord, NodeRecord, StorageRecord

T = TypeVar("T")

PHASES = ("", "forward", "backward")


class TableWriter:
    """Collects the graphs of a document; equal ones share a place."""

    def __init__(self) -> None:
        self._strings: dict[str, int] = {}
        self._nodes: dict[NodeRecord, int] = {}
        self._graphs: dict[GraphRecord, int] = {}
        self._rows: list[list[Any]] = []
        self._graph_rows: list[dict[str, Any]] = []

    def add(self, graph: GraphRecord) -> int:
        """The graph's place in the table of graphs."""
        place = self._graphs.get(graph)
        if place is None:
            place = self._graphs[graph] = len(self._graphs)
            self._graph_rows.append(
                {
                    "nodes": [self.node(node) for node in graph.nodes],
                    "storages": [[self._string(s.node), s.bytes, s.start, s.end] for s in graph.storages],
                    "forward_steps": graph.forward_steps,
                    "unknown": graph.unknown,
                }
            )
        return place

    def tables(self) -> dict[str, Any]:
        """The tables as JSON's own types."""
        return {"strings": list(self._strings), "nodes": self._rows, "graphs": self._graph_rows}

    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def node(self, node: NodeRecord) -> int:
        """The node's place in the table of nodes."""
        place = self._nodes.get(node)
        if place is None:
            place = self._nodes[node] = len(self._nodes)
            words = (node.id, node.name, node.operator, node.text, node.result, node.module, node.source)
            self._rows.append(
                [
                    *map(self._string, words),
                    PHASES.index(node.phase),
                    node.flops,
                    node.moved,
                    [self._string(key) for key in node.inputs],
                    [self._string(key) for key in node.origins],
                ]
            )
        return place


class TableReader:
    """Reads the tables of a document back."""

    def __init__(self, document: dict[str, Any]) -> None:
        """Read.

        Raises:
            ValueError: a table is missing, or a row of it is of another form; the message names it.
        """
        strings = document.get("strings")
        if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
            raise ValueError('not a memopt report: no table "strings"')
        self._strings: list[str] = strings
        self._nodes = self._table(document, "nodes", self._node)
        self.graphs = self._table(document, "graphs", self._graph)

    def _table(self, document: dict[str, Any], name: str, read: Callable[[Any], T]) -> list[T]:
        rows = document.get(name)
        if not isinstance(rows, list):
            raise ValueError(f'not a memopt report: no table "{name}"')
        found = []
        for number, row in enumerate(rows):
            try:
                found.append(read(row))
            except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
                raise ValueError(f"not a memopt report: row {number} of {name} is broken") from error
        return found

    def _node(self, row: Any) -> NodeRecord:
        *words, phase, flops, moved, inputs, origins = row
        key, name, operator, text, result, module, source = (self._text(place) for place in words)
        return NodeRecord(
            key, name, operator, tuple(map(self._text, inputs)), text, result, module, source, PHASES[count(phase)],
            count(flops), count(moved), tuple(map(self._text, origins)),
        )  # fmt: skip

    def _graph(self, row: Any) -> GraphRecord:
        storages = [
            StorageRecord(self._text(node), count(size), count(start), count(end))
            for node, size, start, end in row["storages"]
        ]
        nodes = tuple(self._nodes[count(place)] for place in row["nodes"])
        if not isinstance(row["unknown"], str):
            raise TypeError("unknown")
        return GraphRecord(nodes, tuple(storages), count(row["forward_steps"]), row["unknown"])

    def _text(self, place: Any) -> str:
        return self._strings[count(place)]


def count(value: Any) -> int:
    """The value, which must be a whole number from 0 on.

    Raises:
        TypeError: it is not.
    """
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value
