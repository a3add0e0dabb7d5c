"""A graph in lower precision as any engine can run it: each operator in float32, its result rounded to the type."""

from __future__ import annotations

import onnx_ir as ir

from memopt.onnx.edit import Edit
from memopt.onnx.load import prepare
from memopt.onnx.read import graphs


def emulated(model: ir.Model, kind: ir.DataType) -> ir.Model:
    """Return a model that computes what kernels compute that take and give the type, and sum in float32 in between.

    Args:
        model: the model; it is not changed.
        kind: the type that is emulated. Weights stay in it, and are widened where they are read.
    """
    edit = Edit(prepare(model))
    wide = ir.TensorType(ir.DataType.FLOAT)
    for graph in graphs(edit.model):
        for node in list(graph):
            for value in node.outputs:
                if value.dtype is not kind or value.is_graph_output():
                    continue
                users, last = list(value.uses()), node
                if node.op_type != "Cast":
                    value.type = wide
                    last = _cast(edit, node, value, kind)
                last = _cast(edit, last, last.outputs[0], ir.DataType.FLOAT)
                for use in users:
                    use.node.replace_input_with(use.idx, last.outputs[0])
        for value in list(graph.initializers.values()):
            users = list(value.uses())
            if value.dtype is kind and users:
                made = edit.node(next(iter(graph)), "Cast", [value], {"to": int(ir.DataType.FLOAT)}).outputs[0]
                made.type, made.shape = wide, value.shape
                for use in users:
                    use.node.replace_input_with(use.idx, made)
    return edit.model


def _cast(edit: Edit, after: ir.Node, value: ir.Value, kind: ir.DataType) -> ir.Node:
    made = edit.node(after, "Cast", [value], {"to": int(kind)})
    graph = after.graph
    assert graph is not None
    graph.remove(made)
    graph.insert_after(after, made)
    made.outputs[0].type, made.outputs[0].shape = ir.TensorType(kind), value.shape
    return made
