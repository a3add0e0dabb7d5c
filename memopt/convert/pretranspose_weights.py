"""Turning large weights as they are written: `x @ w.T` becomes `x @ v` without a second copy of w in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

# Smaller ones are folded like any other constant.
_LARGE = 2**20


def pretranspose_weights(model: ir.Model) -> int:
    """Replace Transpose nodes of large initializers, in place, by initializers that are turned when they are read.

    An initializer that something else reads too stays as it is: it would have to be stored twice.

    Returns:
        How many nodes were replaced.
    """
    count = 0
    graph = model.graph
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or tensor.nbytes < _LARGE or value.is_graph_input() or value.is_graph_output():
            continue
        nodes = value.consumers()
        orders = {_order(node, len(tensor.shape)) for node in nodes}
        (order,) = orders if len(orders) == 1 else (None,)
        if order is None or any(node.graph is not graph or node.outputs[0].is_graph_output() for node in nodes):
            continue
        lazy = _turned(tensor, order)
        turned = ir.Value(name=f"{value.name}_turned", shape=lazy.shape, type=value.type, const_value=lazy)
        for node in nodes:
            node.outputs[0].replace_all_uses_with(turned)
            graph.remove(node, safe=True)
            count += 1
        graph.initializers.pop(str(value.name))
        graph.register_initializer(turned)
    return count


def _order(node: ir.Node, rank: int) -> tuple[int, ...] | None:
    if node.op_type != "Transpose" or node.domain:
        return None
    if "perm" in node.attributes:
        return tuple(node.attributes["perm"].as_ints())
    return tuple(reversed(range(rank)))


def _turned(tensor: ir.TensorProtocol, order: tuple[int, ...]) -> ir.LazyTensor:
    sizes = tensor.shape.numpy()
    shape = ir.Shape([sizes[axis] for axis in order])

    def read() -> ir.Tensor[Any]:
        return ir.Tensor(np.ascontiguousarray(np.transpose(tensor.numpy(), order)), dtype=tensor.dtype)

    return ir.LazyTensor(read, dtype=tensor.dtype, shape=shape, name=tensor.name)
