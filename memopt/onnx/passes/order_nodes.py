"""Put the nodes in the order whose peak of memory is least."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import onnx_ir as ir

from memopt.onnx.edit import Edit
from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.read import bytes_of, graphs, is_standard, subgraphs
from memopt.onnx.symbolic import Symbols
from memopt.solve.order import OrderProblem, smallest_peak

# The size that a dynamic axis is taken to have.
NOMINAL = 8
# Larger graphs are left in their order: the search would take too long.
_MOST_NODES = 3000
# The beam of the search is this over the number of nodes: about a second whatever the graph.
_BEAM = 6000
# Results that share their input's memory.
_VIEWS = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"}
# Results that may take over the memory of an input of the same size that nothing else reads.
_IN_PLACE = {
    "Abs", "Add", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log",
    "LogSoftmax", "Mish", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Selu", "Sigmoid", "Softmax", "Softplus", "Sqrt",
    "Sub", "Tanh", "BatchNormalization",
}  # fmt: skip


class OrderNodes(OnnxPass):
    """Reorder the nodes of the main graph so that the most bytes alive at any moment are fewer.

    The order is that of `memopt.solve.order`: operations with what they read and make, views sharing memory,
    elementwise results taking over memory that is no longer needed; weights and inputs are held anyway. It is taken
    only where its peak is smaller. Dynamic axes count as `NOMINAL`, or as `axes` says. An engine may order for itself,
    as ONNX Runtime does with nodes that nothing forces; the file's order is what the others follow.

    Refusals:
        - A value of unknown rank or type; more than 3,000 nodes.
    """

    name: ClassVar[str] = "order_nodes"

    def __init__(self, axes: Mapping[str, int] | None = None, effort: int = 2_000) -> None:
        """Take sizes of named dynamic axes, and how many moves the exact search may try (about 20 µs each)."""
        self.axes = dict(axes or {})
        self.effort = effort

    def rewrite(self, edit: Edit) -> None:
        """Order the main graph."""
        graph = edit.model.graph
        nodes = list(graph)
        if len(nodes) > _MOST_NODES:
            edit.refuse(str(graph.name), f"{len(nodes)} nodes are more than {_MOST_NODES}")
            return
        problem = self._problem(edit, nodes)
        if problem is None or not nodes:
            return
        unchanged = tuple(range(len(nodes)))
        found = smallest_peak(problem, effort=self.effort, beam=max(2, min(32, _BEAM // len(nodes))))
        before = smallest_peak(problem, effort=0, beam=0).peak_bytes
        if found.steps == unchanged or found.peak_bytes >= before:
            return
        graph.remove(nodes)
        graph.extend(nodes[step] for step in found.steps)
        edit.change(f"peak of {before} bytes is now {found.peak_bytes} (dynamic axes at {NOMINAL})")

    def _problem(self, edit: Edit, nodes: list[ir.Node]) -> OrderProblem | None:
        symbols = Symbols(edit.model)
        storage: dict[ir.Value, int] = {}
        sizes: list[int] = []
        touches, after, takes = [], [], []
        place = {node: index for index, node in enumerate(nodes)}
        for node in nodes:
            reads = [value for value in read_by(node) if value.producer() in place]
            held = dict.fromkeys(storage[value] for value in reads)
            view = next((storage[v] for v in node.inputs[:1] if v in storage), None) if _is(node, _VIEWS) else None
            taken = -1
            for index, value in enumerate(node.outputs):
                if view is not None:
                    storage[value] = view
                    continue
                size = self._bytes(value, symbols)
                if size is None:
                    edit.refuse(node, f"the size of {value.name or index} is not known: nothing is ordered")
                    return None
                storage[value] = len(sizes)
                sizes.append(size)
                if index == 0 and _is(node, _IN_PLACE):
                    taken = next((s for s in held if sizes[s] == size), -1)
            made = [place[node] for node in (value.producer() for value in reads) if node is not None]
            touches.append(tuple(dict.fromkeys([*held, *(storage[value] for value in node.outputs)])))
            after.append(tuple(dict.fromkeys(made)))
            takes.append(taken)
        kept = frozenset(storage[value] for value in edit.model.graph.outputs if value in storage)
        return OrderProblem(tuple(sizes), tuple(touches), tuple(after), (0,) * len(nodes), kept, tuple(takes))

    def _bytes(self, value: ir.Value, symbols: Symbols) -> int | None:
        """The bytes of a value, dynamic axes at their nominal size; None when rank or type are unknown."""
        if not value.name:
            return 0
        shape = symbols.shapes.get(value)
        if shape is None or not isinstance(value.type, ir.TensorType) or value.dtype is None:
            return None
        total = 1
        for size in shape:
            axes = {symbol: self.axes.get(symbol.name, NOMINAL) for symbol in size.free_symbols}
            total *= max(int(size.subs(axes)), 0)
        return max(int(total * value.dtype.itemsize), 1) if value.dtype is not ir.DataType.STRING else 8 * total


def peak_bytes(model: ir.Model, axes: Mapping[str, int]) -> int | None:
    """What a run of the prepared model holds at its fullest moment, in the order of its nodes: weights and inputs too.

    Args:
        axes: the sizes of the dynamic axes, by name.

    Returns:
        Bytes; None where the size of a value is not known, or the graph has too many nodes.
    """
    nodes = list(model.graph)
    if len(nodes) > _MOST_NODES:
        return None
    ordering = OrderNodes(axes)
    problem = ordering._problem(Edit(model), nodes)
    if problem is None:
        return None
    symbols = Symbols(model)
    made = [symbols.shapes.get(value, ()) for node in nodes for value in node.outputs]
    if any(symbol.name not in axes for shape in made for size in shape for symbol in size.free_symbols):
        return None
    sizes = [ordering._bytes(value, symbols) for value in model.graph.inputs if not value.is_initializer()]
    weights = [bytes_of(value) for graph in graphs(model) for value in graph.initializers.values()]
    if any(size is None for size in sizes):
        return None
    held = smallest_peak(problem, effort=0, beam=0).peak_bytes if nodes else 0
    return held + sum(weights) + sum(size for size in sizes if size is not None)


def _is(node: ir.Node, operators: set[str]) -> bool:
    return is_standard(node) and node.op_type in operators


def read_by(node: ir.Node) -> list[ir.Value]:
    """What a node reads, the graphs inside it included."""
    found = [value for value in node.inputs if value is not None]
    for graph in subgraphs(node):
        for inner in graph.all_nodes():
            found.extend(value for value in inner.inputs if value is not None and value.graph is not graph)
    return list(dict.fromkeys(found))
