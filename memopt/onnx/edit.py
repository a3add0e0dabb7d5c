"""Edit: a model being rewritten, with the notes of what was and what was not done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from memopt.onnx.read import INFERRED, bytes_of, graphs, label, subgraphs
from memopt.pass_manager import Change, Refusal


class Edit:
    """A copy of a model that one pass rewrites.

    Attributes:
        model: the copy.
        changes, refusals: what the pass did and did not do, in order.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.changes: list[Change] = []
        self.refusals: list[Refusal] = []
        self._names: set[str] = set()
        for graph in graphs(model):
            self._names.update(str(value.name) for value in graph.inputs)
            self._names.update(graph.initializers)
            for node in graph:
                self._names.update(str(value.name) for value in node.outputs)
                self._names.add(str(node.name))

    def graphs(self) -> list[ir.Graph]:
        """The main graph and every subgraph."""
        return list(graphs(self.model))

    def change(self, summary: str, before: Sequence[str] = (), after: Sequence[str] = ()) -> None:
        """Note a rewrite that was made."""
        self.changes.append(Change(summary, tuple(before), tuple(after)))

    def refuse(self, node: ir.Node | str, reason: str) -> None:
        """Note a rewrite that was considered and not made."""
        self.refusals.append(Refusal(node if isinstance(node, str) else label(node), reason))

    def fresh(self, stem: str) -> str:
        """A name that no node and no value of the model has."""
        name, number = stem, 1
        while name in self._names:
            name, number = f"{stem}_{number}", number + 1
        self._names.add(name)
        return name

    def node(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        stem: str | None = None,
        outputs: int = 1,
        domain: str = "",
    ) -> ir.Node:
        """Insert a node before another, in the same graph; its outputs have fresh names."""
        name = self.fresh(stem or f"{label(before)}_{op_type.lower()}")
        values = [ir.Value(name=self.fresh(f"{name}_{index}" if index else f"{name}_out")) for index in range(outputs)]
        node = ir.Node(
            domain, op_type, inputs, ir.convenience.convert_attributes(attributes or {}), outputs=values, name=name
        )
        graph = before.graph
        assert graph is not None
        graph.insert_before(before, node)
        if domain:
            self.model.graph.opset_imports.setdefault(domain, 1)
        return node

    def initializer(
        self, graph: ir.Graph, stem: str, array: np.ndarray[Any, Any], dtype: ir.DataType | None = None
    ) -> ir.Value:
        """Add a constant to a graph and return its value; `dtype` where numpy's own type does not tell."""
        name = self.fresh(stem)
        tensor: ir.TensorProtocol
        if array.dtype.kind in "OSU":
            items = [item.encode() if isinstance(item, str) else bytes(item) for item in array.reshape(-1).tolist()]
            tensor = ir.StringTensor(items, shape=ir.Shape(array.shape), name=name)
        else:
            tensor = ir.Tensor(array, dtype=dtype or ir.DataType.from_numpy(array.dtype), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
        graph.register_initializer(value)
        return value

    def can_replace(self, old: ir.Value, new: ir.Value) -> bool:
        """Whether every user of `old` may read `new`: an output of a graph has to be made by a node of that graph."""
        if not old.is_graph_output():
            return True
        made = new.producer()
        same = made is not None and made.graph is old.graph
        return same and not new.is_graph_output() and not new.is_initializer() and not new.is_graph_input()

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Let every user of `old` read `new`; where `old` leaves its graph, `new` takes its name and declared type.

        Raises:
            ValueError: see `can_replace`.
        """
        if not self.can_replace(old, new):
            raise ValueError(f"{old.name} is an output that {new.name} cannot stand for")
        if old.is_graph_output():
            name, new.type, shape = old.name, old.type, old.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            old.name = self.fresh(f"{name}_replaced")
            new.name, new.shape = name, shape
            new.meta[INFERRED] = old.meta.get(INFERRED)
        else:
            old.replace_all_uses_with(new)
            if new.shape is None and not new.is_graph_output():
                new.shape = old.shape
        if new.type is None:
            new.type = old.type

    def erase(self, node: ir.Node) -> int:
        """Remove a node whose results nobody reads, and what only it read; return how many nodes went."""
        erased, work = 0, [node]
        while work:
            item = work.pop()
            if item.graph is None or any(value.uses() or value.is_graph_output() for value in item.outputs):
                continue
            sources = [value for value in item.inputs if value is not None] + detach(item)
            item.graph.remove(item, safe=True)
            erased += 1
            for value in sources:
                drop_initializer(value)
                made = value.producer()
                if made is not None:
                    work.append(made)
        return erased


def drop_initializer(value: ir.Value) -> int:
    """Remove an initializer that nothing reads; return the bytes that it took. Graph inputs and outputs stay."""
    if not value.is_initializer() or value.uses() or value.is_graph_output() or value.is_graph_input():
        return 0
    graph = value.graph
    assert graph is not None
    graph.initializers.pop(str(value.name))
    return bytes_of(value)


def detach(node: ir.Node) -> list[ir.Value]:
    """Let the graphs inside a node read nothing any more; return what they read from outside."""
    outside: list[ir.Value] = []
    for graph in subgraphs(node):
        for inner in graph.all_nodes():
            for index, value in enumerate(inner.inputs):
                if value is None:
                    continue
                if value.graph is not graph:
                    outside.append(value)
                inner.replace_input_with(index, None)
    return outside
