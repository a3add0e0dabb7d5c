"""An ONNX model as the plain data that a report keeps of it: nodes, what they cost, and the memory of their results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from memopt.difference.graph_diff import GraphNode
from memopt.graph.record import GraphRecord, NodeRecord, StorageRecord, identities, origins
from memopt.onnx.origin import module_of, source_of
from memopt.onnx.read import argument, attribute, label, subgraphs
from memopt.onnx.sizes import Shapes, bytes_of_value, shape_of

Changes = Sequence[tuple[Sequence[str], Sequence[str]]]

# Results that engines leave where the operand is.
_VIEWS = {"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}
_LONGEST = 200

_PRODUCTS = {"MatMul", "FusedMatMul", "Gemm", "FusedGemm"}
_CONVOLUTIONS = {"Conv", "FusedConv"}
_COUNTED = {*_PRODUCTS, *_CONVOLUTIONS, "ConvTranspose", "Attention", "MultiHeadAttention"}


def snapshot(
    model: ir.Model, history: Sequence[GraphRecord] = (), changes: Changes = (), shapes: Shapes | None = None
) -> GraphRecord:
    """Put a model on record; weights and constants are resident, other results count until their last use.

    Args:
        model: read, not changed; none of its tensors is kept.
        history: the compilation's graphs so far, the one that the pass was given last, for the identity of nodes.
        changes: what the pass says: names of nodes before, and of those after that stand for them.
        shapes: of values, by name: memory and work are those at these sizes.
    """
    walk = _Walk(shapes or {})
    walk.graph(model.graph)
    ids = identities([node for node, _ in walk.nodes], history, changes)
    earlier = history[-1] if history else None
    stands_for = origins(ids, earlier, changes)
    known = {} if earlier is None else {node.id: node for node in earlier.nodes}
    made = []
    for node, (flops, moved) in walk.nodes:
        old = [known[key] for key in stands_for.get(node.name, ()) if key in known]
        made.append(
            NodeRecord(
                ids[node.name],
                node.name,
                node.operator,
                tuple(ids[name] for name in node.inputs),
                node.text,
                node.result,
                node.module or next((item.module for item in old if item.module), ""),
                node.source or next((item.source for item in old if item.source), ""),
                "",
                flops,
                moved,
                stands_for.get(node.name, ()),
            )
        )
    storages, unknown = walk.memory(model.graph)
    records = tuple(StorageRecord(ids[name], *rest) for name, *rest in storages)
    steps = sum(node.operator not in ("constant", "input", "output") for node in made)
    return GraphRecord(tuple(made), () if unknown else records, steps, unknown)


class _Walk:
    """The nodes of a model in order, those of graphs inside a node before it; names made unique."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.nodes: list[tuple[GraphNode, tuple[int, int]]] = []
        self._names: set[str] = set()
        self._maker: dict[ir.Value, tuple[str, int]] = {}
        self._step: dict[ir.Node, int] = {}
        self._name: dict[ir.Node, str] = {}
        self._open = 0  # nodes whose arithmetic depends on sizes that are not known

    def graph(self, graph: ir.Graph) -> None:
        for value in graph.inputs:
            self._resting(value, "input")
        for value in graph.initializers.values():
            if value not in self._maker:
                self._resting(value, "constant")
        for node in graph:
            for inner in subgraphs(node):
                self.graph(inner)
            self._node(node)
        if not any(graph is inner for node in self._name for inner in subgraphs(node)):
            reads = [self._maker[value][0] for value in graph.outputs if value in self._maker]
            text = ", ".join(f"{_plain(str(value.name))}: %{at}" for at, value in enumerate(graph.outputs))
            self._add(GraphNode(self._unique("output"), "output", tuple(reads), f"({text})"), (0, 0))

    def _unique(self, name: str) -> str:
        found, number = name, 2
        while found in self._names:
            found, number = f"{name}#{number}", number + 1
        self._names.add(found)
        return found

    def _add(self, node: GraphNode, work: tuple[int, int]) -> None:
        self.nodes.append((node, work))

    def _resting(self, value: ir.Value, operator: str) -> None:
        name = self._unique(str(value.name))
        self._maker[value] = name, 0
        self._add(GraphNode(name, operator, (), f" {_plain(str(value.name))}", _type(value)), (0, 0))

    def _node(self, node: ir.Node) -> None:
        name = self._unique(label(node))
        constant = node.op_type == "Constant" and node.domain == ""
        reads: list[str] = []
        words = []
        for value in node.inputs:
            made = None if value is None else self._maker.get(value)
            if made is None:
                words.append("none" if value is None else _plain(str(value.name)))
                continue
            reads.append(made[0])
            words.append(f"%{len(reads) - 1}" + (f"[{made[1]}]" if made[1] else ""))
        words += [f"{key}={_plain(_attribute(item))}" for key, item in node.attributes.items()]
        for place, value in enumerate(node.outputs):
            self._maker[value] = name, place
        operator = "constant" if constant else f"{node.domain}.{node.op_type}".lstrip(".")
        result = ", ".join(_type(value) for value in node.outputs if value.name)
        self._name[node] = name
        if not constant:
            self._step[node] = len(self._step)
        found = GraphNode(
            name, operator, tuple(reads), f"({', '.join(words)})", result, module_of(node), source_of(node)
        )
        self._add(found, (0, 0) if constant else self._work(node))

    def _work(self, node: ir.Node) -> tuple[int, int]:
        if node.op_type in _VIEWS:
            return 0, 0
        moved = sum(
            bytes_of_value(value, self.shapes) or 0 for value in {*node.inputs, *node.outputs} if value is not None
        )
        flops = operations(node, self.shapes)
        self._open += flops is None
        return flops or 0, moved

    def memory(self, graph: ir.Graph) -> tuple[list[tuple[str, int, int, int]], str]:
        """Name, bytes and span of each result of the main graph; or why they are not known."""
        if any(subgraphs(node) for node in graph):
            return [], "a node holds a graph of its own"
        last: dict[ir.Value, int] = {}
        base: dict[ir.Value, ir.Value] = {}
        for node in graph:
            operand = node.inputs[0] if node.inputs and node.op_type in _VIEWS and node.domain == "" else None
            for result in node.outputs if operand is not None else ():
                assert operand is not None
                base[result] = base.get(operand, operand)
            for value in (*node.inputs, *node.outputs):
                if value is not None and node in self._step:
                    last[base.get(value, value)] = self._step[node]
        for value in graph.outputs:
            last[base.get(value, value)] = len(self._step) - 1
        found, unknown = [], 0
        for node in graph:
            for value in node.outputs if node in self._step else ():
                if value in base or not value.name:
                    continue
                size = bytes_of_value(value, self.shapes)
                unknown += size is None
                found.append((self._name[node], size or 0, self._step[node], last[value] + 1))
        if unknown:
            return found, f"{unknown} results have no known size"
        return found, f"{self._open} products have operands of no known size" if self._open else ""


def _attribute(item: ir.Attr) -> str:
    if item.is_ref():
        return f"@{item.ref_attr_name}"
    if item.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return "…"
    if item.type is ir.AttributeType.TENSOR:
        tensor = item.as_tensor()
        small = tensor.size <= 8 and tensor.dtype is not ir.DataType.STRING
        return str(tensor.numpy().tolist()) if small else f"{tensor.dtype.name.lower()}{list(tensor.shape.numpy())}"
    text = str(list(item.value) if isinstance(item.value, tuple) else item.value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _type(value: ir.Value) -> str:
    kind = "" if value.dtype is None else value.dtype.name.lower()
    if value.shape is None:
        return kind
    return f"{kind}[{', '.join(_dims(value))}]"


def _dims(value: ir.Value) -> Iterator[str]:
    for size in value.shape or ():
        named = size if isinstance(size, int) else size.value
        yield (
            "?" if named is None or str(named).startswith("unk__") else str(named)
        )  # a name that the inference made up


def _plain(text: str) -> str:
    return text.replace("%", "%%")


def operations(node: ir.Node, shapes: Shapes) -> int | None:
    """Floating-point operations of one call, two for a multiplication with its addition.

    Counted are matrix products, convolutions and attention; other nodes have none. None where sizes are not known.
    """
    kind = node.op_type
    if kind not in _COUNTED:
        return 0
    found = [shape_of(argument(node, place), shapes) for place in range(3)]
    first, second, third = found
    result = shape_of(node.outputs[0], shapes)
    if not first or not second or result is None:
        return None
    if kind in _PRODUCTS:
        turned = bool(attribute(node, "transA", 0))
        return 2 * math.prod(result) * first[-2 if turned and len(first) > 1 else -1]
    if kind in _CONVOLUTIONS:
        return 2 * math.prod(result) * math.prod(second[1:])
    if kind == "ConvTranspose":
        return 2 * math.prod(first) * math.prod(second[1:])
    if third is None or not len(first) == len(second) == len(third):
        return None
    # Scores: every query beside every key; then every score beside every value.
    return 2 * math.prod(first[:-1]) * second[-2] * (first[-1] + third[-1])
