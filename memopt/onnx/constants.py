"""What a graph computes from constants alone, evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from memopt.graph.rewrite import Refused
from memopt.onnx.evaluate import evaluate
from memopt.onnx.read import argument, attribute, constant, dims, graphs, has_subgraphs, is_random, is_standard, opset

Array = np.ndarray[Any, Any]
_Refuse = Callable[[ir.Node, str], None]

# Kept as they are: engines match them with the operators around, and folding them would undo a quantization.
_KEPT = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}
# The most bytes that evaluated values may take together, whatever is kept of them.
_LIMIT = 1 << 30


def evaluated(model: ir.Model, refuse: _Refuse = lambda node, reason: None) -> dict[ir.Value, Array]:
    """The results of every node that depends on constants alone, constants themselves left out.

    Args:
        refuse: is told of each node that could not be evaluated, and why.
    """
    known: dict[ir.Value, Array] = {}
    version = opset(model)
    for graph in graphs(model):
        for node in graph:
            _evaluate(node, known, version, refuse)
    return known


def _evaluate(node: ir.Node, known: dict[ir.Value, Array], version: int, refuse: _Refuse) -> None:
    """Note the node's results where they are the same at every call."""
    if is_standard(node, "Shape", "Size"):
        found = _shape(node, version)
        if found is not None:
            known[node.outputs[0]] = found
            return
    if is_standard(node, "Constant"):
        return
    arrays = [None if value is None else known.get(value, constant(value)) for value in node.inputs]
    if (not node.inputs and not is_standard(node)) or any(
        array is None and value is not None for array, value in zip(arrays, node.inputs, strict=True)
    ):
        return
    if is_random(node, version):
        refuse(node, "it draws random numbers")
    elif has_subgraphs(node):
        refuse(node, "it holds graphs")
    elif not is_standard(node):
        refuse(node, f"its domain is {node.domain}")
    elif node.op_type in _KEPT:
        refuse(node, "it is quantization, which engines fuse with its neighbours")
    elif any(item.is_ref() for item in node.attributes.values()):
        refuse(node, "its attributes are not known")
    else:
        try:
            values = evaluate(node, arrays, version, _LIMIT - sum(int(array.nbytes) for array in known.values()))
        except Refused as reason:
            refuse(node, str(reason))
            return
        known.update((out, value) for out, value in zip(node.outputs, values, strict=True) if value is not None)


def _shape(node: ir.Node, version: int) -> Array | None:
    found = dims(argument(node, 0))
    if found is None:
        return None
    if version >= 15 and node.op_type == "Shape":
        found = found[slice(attribute(node, "start", 0), attribute(node, "end", None))]
    numbers = [item for item in found if item is not None]
    if len(numbers) < len(found):
        return None
    return np.asarray(numbers if node.op_type == "Shape" else int(np.prod(numbers, dtype=object)), dtype=np.int64)
