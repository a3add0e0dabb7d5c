"""Which nodes of a graph may compute in float16 or bfloat16, and why the others may not."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from memopt.graph.rewrite import Refused
from memopt.onnx.read import attribute, constant, has_subgraphs, opset, producer

NAMES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
# Sums of many terms, and functions whose result loses its digits or leaves float16's range where the operand does not.
SENSITIVE = frozenset({
    "BatchNormalization", "Cos", "CumSum", "Div", "Exp", "GRU", "GlobalAveragePool", "GlobalLpPool",
    "GroupNormalization", "InstanceNormalization", "LRN", "LSTM", "LayerNormalization", "Log", "LogSoftmax",
    "LpNormalization", "MeanVarianceNormalization", "NegativeLogLikelihoodLoss", "Pow", "RMSNormalization", "RNN",
    "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd", "ReduceSum",
    "ReduceSumSquare", "Sin", "SkipLayerNormalization", "Softmax", "SoftmaxCrossEntropyLoss", "Softplus", "Sqrt", "Tan",
})  # fmt: skip
# Results that hold the very numbers that were given: computed in whatever precision these come and go.
MOVES = frozenset({
    "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape",
    "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where",
})  # fmt: skip
# Operators of ONNX Runtime with kernels for lower precision, which take softmax and sums in float32 themselves.
_RUNTIME = frozenset({"MultiHeadAttention", "QuickGelu"})
# What hands numbers that are too large on, where a bounded function would not.
_UNBOUNDED = MOVES | {"Abs", "Add", "Div", "Max", "Min", "Mul", "Neg", "Sub", "Sum"}
_TYPE_ATTRIBUTES = {"to", "dtype", "output_dtype"}


def is_float32(value: ir.Value | None) -> bool:
    """Whether the value is a float32 tensor."""
    return value is not None and isinstance(value.type, ir.TensorType) and value.dtype is ir.DataType.FLOAT


def choose(model: ir.Model, kind: ir.DataType) -> tuple[set[ir.Node], dict[ir.Node, str]]:
    """The nodes of the main graph to compute in the type, and the reason of each other one that reads or makes float32.

    Args:
        model: with the type of every value.
        kind: FLOAT16 or BFLOAT16.
    """
    version = opset(model)
    chosen: set[ir.Node] = set()
    reasons: dict[ir.Node, str] = {}
    unfit: set[ir.Value] = set()
    for node in model.graph:
        if not any(is_float32(value) for value in (*node.inputs, *node.outputs)):
            continue
        large = [value for value in node.inputs if value is not None and (value in unfit or too_large(value, kind))]
        if large and node.op_type in _UNBOUNDED:
            unfit.update(node.outputs)
        try:
            if large:
                raise Refused(f"{large[0].name} holds numbers that {kind.name.lower()} cannot hold")
            _check(node, kind, version)
        except Refused as reason:
            reasons[node] = str(reason)
        else:
            chosen.add(node)
    _leave_moves(model, chosen, reasons)
    return chosen, reasons


def _check(node: ir.Node, kind: ir.DataType, version: int) -> None:
    name = kind.name.lower()
    if node.op_type in SENSITIVE and not _sums_wide(node):
        raise Refused("it is sensitive to rounding")
    if has_subgraphs(node):
        raise Refused("it holds graphs")
    if any(attribute in node.attributes for attribute in _TYPE_ATTRIBUTES):
        raise Refused("it says which type it makes")
    if not any(is_float32(value) for value in node.inputs):
        raise Refused("it makes float32 of other types")
    if not any(is_float32(value) for value in node.outputs):
        raise Refused("it makes other types of float32")
    for value in node.inputs:
        array = None if value is None else constant(value)
        small = array is not None and array.size == 1 and array.dtype == np.float32
        if small and array is not None and 0 < abs(float(array.reshape(()))) < _limits(kind)[1]:
            raise Refused(f"{value.name if value else ''} is a number that vanishes in {name}")
    if node.domain == "com.microsoft" and node.op_type in _RUNTIME:
        return
    if node.domain or node.overload:
        raise Refused(f"it is an operator of {node.domain}")
    try:
        schema = onnx.defs.get_schema(node.op_type, version, "")
    except onnx.defs.SchemaError as error:
        raise Refused("it is no operator that is known") from error
    kinds = {item.type_param_str: item.allowed_type_strs for item in schema.type_constraints}
    wanted = f"tensor({name})"
    for values, formals in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for index, value in enumerate(values):
            formal = formals[min(index, len(formals) - 1)]
            if is_float32(value) and wanted not in kinds.get(formal.type_str, [formal.type_str]):
                raise Refused(f"operator set {version} has no {node.op_type} in {name}")


def _sums_wide(node: ir.Node) -> bool:
    """Whether the operator itself is said to compute in float32, whatever it takes and gives (stash_type)."""
    normalizes = node.op_type in ("LayerNormalization", "RMSNormalization") and len(node.outputs) == 1
    return normalizes and int(attribute(node, "stash_type", 1)) == 1


def _leave_moves(model: ir.Model, chosen: set[ir.Node], reasons: dict[ir.Node, str]) -> None:
    """Keep what only moves numbers from one float32 node to others in float32: it would lose digits for nothing."""
    again = True
    while again:
        again = False
        for node in model.graph:
            if node not in chosen or node.op_type not in MOVES:
                continue
            made_by = [value.producer() for value in node.inputs if is_float32(value) and value is not None]
            read_by = [use.node for value in node.outputs for use in value.uses()]
            computed = [item for item in made_by if item is not None]
            leaves = any(value.is_graph_output() for value in node.outputs)
            if not chosen.intersection(computed) and computed and not chosen.intersection(read_by) and not leaves:
                chosen.remove(node)
                reasons[node] = "it stands between nodes in float32"
                again = True


def too_large(value: ir.Value, kind: ir.DataType) -> bool:
    """Whether a constant holds finite numbers beyond the type's largest."""
    if not is_float32(value) or kind is ir.DataType.BFLOAT16:
        return False
    array = constant(value)
    if array is None or not array.size:
        node = producer(value, "ConstantOfShape")
        array = (
            node.attributes["value"].as_tensor().numpy() if node is not None and "value" in node.attributes else None
        )
    if array is None or not array.size:
        return False
    finite = np.abs(array[np.isfinite(array)])
    return bool(finite.size) and float(finite.max()) > _limits(kind)[0]


def _limits(kind: ir.DataType) -> tuple[float, float]:
    """The largest number, and the smallest normal one."""
    found: Any = ml_dtypes.finfo(kind.numpy())  # type: ignore[no-untyped-call]
    return float(found.max), float(found.smallest_normal)
