"""Graphs in float16 or bfloat16 as any CPU can run them: each operator in float32, its result rounded to the type.

ONNX Runtime's CPU has no kernels for bfloat16, and few for float16: for the others it casts to float32, and leaves out
the casts between neighbours, so that which results are rounded depends on what stands beside them. Rounded one by one,
a result depends on its operator and operands alone, and two graphs can be compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from memopt.onnx.edit import Edit
from memopt.onnx.engines import EngineError, Feeds, OnnxRuntime
from memopt.onnx.load import OnnxModelError, prepare
from memopt.onnx.read import graphs, has_subgraphs, subgraphs

NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_TYPE_ATTRIBUTES = {"to", "dtype", "output_dtype"}
_WIDE = ir.TensorType(ir.DataType.FLOAT)


def narrow_types(model: ir.Model) -> set[ir.DataType]:
    """Which of float16 and bfloat16 the values of a model have."""
    return {
        value.dtype for graph in graphs(model) for value in _values(graph) if value.dtype is not None and _is(value)
    }


class Emulated(OnnxRuntime):
    """ONNX Runtime on the CPU, every result of float16 and bfloat16 rounded by itself.

    Raises:
        EngineError: ONNX Runtime refuses the graph, or a graph within a node holds such numbers.
    """

    name = "onnxruntime, each result rounded"

    def __init__(self, model: ir.Model) -> None:
        try:
            super().__init__(emulated(model))
        except OnnxModelError as error:
            raise EngineError(str(error)) from error
        self._types = [value.dtype.numpy() if _is(value) else None for value in model.graph.outputs]  # type: ignore[union-attr]
        self._wide = {str(value.name) for value in model.graph.inputs if _is(value)}

    def run(self, feeds: Feeds) -> list[Any]:
        """Run on the inputs by name; outputs have the types of the model's."""
        given = {name: value.astype(np.float32) if name in self._wide else value for name, value in feeds.items()}
        found = super().run(given)
        return [value if kind is None else value.astype(kind) for value, kind in zip(found, self._types, strict=True)]


def emulated(model: ir.Model) -> ir.Model:
    """Return a model that computes what kernels compute that take and give the type, and sum in float32 in between.

    Inputs and outputs of float16 and bfloat16 are float32 there. Weights stay as they are, and are widened where they
    are read.

    Args:
        model: the model; it is not changed.

    Raises:
        EngineError: a graph within a node holds such numbers.
        OnnxModelError: the model is invalid.
    """
    edit = Edit(prepare(model))
    graph = edit.model.graph
    for node in graph:
        if has_subgraphs(node) and any(_is(value) for inner in subgraphs(node) for value in _values(inner)):
            raise EngineError(f"{node.name} holds a graph with numbers of lower precision")
    for node in list(graph):
        for value in node.outputs:
            if _is(value):
                _round(edit, node, value)
            elif isinstance(value.type, ir.SequenceType) and value.dtype in NARROW:
                value.type = ir.SequenceType(_WIDE)  # its items were rounded when they were made
    for value in list(graph.initializers.values()):
        if _is(value) and not value.is_graph_input():
            _widen(edit, value)
    for value in graph.inputs:
        if _is(value):
            value.type = _WIDE
    return edit.model


def _round(edit: Edit, node: ir.Node, value: ir.Value) -> None:
    """Let whoever reads the value read it in float32, rounded to its type."""
    kind, users, leaves, name = value.dtype, list(value.uses()), value.is_graph_output(), value.name
    assert kind is not None
    rounded = value
    if not _says_type(node):
        value.type = _WIDE
        rounded = _cast(edit, node, value, kind)
    turned = _cast(edit, node, rounded, ir.DataType.FLOAT)
    for use in users:
        use.node.replace_input_with(use.idx, turned)
    if leaves:
        outputs = edit.model.graph.outputs
        for index, output in enumerate(outputs):
            if output is value:
                outputs[index] = turned
        value.name, turned.name = edit.fresh(f"{name}_rounded"), name


def _widen(edit: Edit, value: ir.Value) -> None:
    """Widen a weight before each node that reads it: never are all of them there in float32 at once."""
    for use in list(value.uses()):
        made = edit.node(use.node, "Cast", [value], {"to": int(ir.DataType.FLOAT)}).outputs[0]
        made.type, made.shape = _WIDE, value.shape
        use.node.replace_input_with(use.idx, made)


def _says_type(node: ir.Node) -> bool:
    """Whether the type of what the node makes is its attribute's, whatever it reads."""
    return node.op_type == "Constant" or any(
        item.name in _TYPE_ATTRIBUTES or item.type is ir.AttributeType.TENSOR for item in node.attributes.values()
    )


def _cast(edit: Edit, node: ir.Node, value: ir.Value, kind: ir.DataType) -> ir.Value:
    """The value in another type, by a node right after the one that makes it."""
    made, after = edit.node(node, "Cast", [value], {"to": int(kind)}), value.producer()
    graph = node.graph
    assert graph is not None and after is not None
    graph.remove(made)
    graph.insert_after(after, made)
    made.outputs[0].type, made.outputs[0].shape = ir.TensorType(kind), value.shape
    return made.outputs[0]


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]


def _is(value: ir.Value) -> bool:
    return isinstance(value.type, ir.TensorType) and value.dtype in NARROW
