"""A model evaluated in float64: the truth that the errors of float32 runs are measured against."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from memopt.onnx.engines import EngineError, Reference
from memopt.onnx.float64_operators import OPERATORS
from memopt.onnx.read import graphs, is_standard

_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
# Models with more weight than this are not evaluated in float64, which takes at least twice as much memory.
WEIGHT_BYTES = 512 * 2**20
# Operators that round, which in float64 would round elsewhere.
_ROUNDING = {"QuantizeLinear", "DynamicQuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul", "BitCast"}
# Attributes that name a type of result.
_TYPE_ATTRIBUTES = {"to", "dtype", "output_dtype"}


class Float64(Reference):
    """The reference evaluator on a copy of the model with every float32, float16 and bfloat16 widened.

    Convolutions, pools and error functions are computed by torch in float64, fast and independent of the evaluator,
    some of whose operators are wrong (grouped ConvTranspose, LRN, BatchNormalization of operator set 9).

    Raises:
        EngineError: the model is too large, quantized, calls functions, or uses operators outside the standard.
    """

    name = "float64"

    def __init__(self, model: ir.Model) -> None:
        super().__init__(_widened(model), OPERATORS)

    def run(self, feeds: Any) -> list[Any]:
        """Run on the inputs by name; floating ones are widened."""
        return super().run({name: _wide(value) for name, value in feeds.items()})


def _wide(value: Any) -> Any:
    if isinstance(value, list):
        return [_wide(item) for item in value]
    if isinstance(value, np.ndarray) and (value.dtype.kind == "f" or value.dtype.name == "bfloat16"):
        return value.astype(np.float64)
    return value


def _widened(model: ir.Model) -> ir.Model:
    if model.functions:
        raise EngineError("functions are not evaluated in float64")
    if (
        sum(v.const_value.nbytes for g in graphs(model) for v in g.initializers.values() if v.const_value)
        > WEIGHT_BYTES
    ):
        raise EngineError(f"more than {WEIGHT_BYTES} bytes of weights are not evaluated in float64")
    wide = model.clone()
    for graph in graphs(wide):
        for value in (*graph.inputs, *graph.outputs, *(v for node in graph for v in node.outputs)):
            # Types are shared among copies of a model: a new one is put in place, none is edited.
            if isinstance(value.type, ir.TensorType) and value.dtype in _FLOATS:
                value.type = ir.TensorType(ir.DataType.DOUBLE)
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype in _FLOATS:
                value.const_value = _wide_tensor(value.const_value)
                value.type = ir.TensorType(ir.DataType.DOUBLE)
        for node in graph:
            _widen_node(node)
    return wide


def _widen_node(node: ir.Node) -> None:
    if not is_standard(node) or node.op_type in _ROUNDING:
        raise EngineError(f"{node.op_type} is not evaluated in float64")
    for attribute in list(node.attributes.values()):
        if attribute.is_ref():
            continue
        if attribute.name in _TYPE_ATTRIBUTES and attribute.value in [int(item) for item in _FLOATS]:
            node.attributes.add(ir.AttrInt64(attribute.name, int(ir.DataType.DOUBLE)))
        elif attribute.type is ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _FLOATS:
            node.attributes.add(ir.AttrTensor(attribute.name, _wide_tensor(attribute.as_tensor())))
        elif attribute.name in ("value_float", "value_floats"):
            array = np.asarray(attribute.value, dtype=np.float32).astype(np.float64)
            del node.attributes[attribute.name]
            node.attributes.add(ir.AttrTensor("value", ir.Tensor(array)))


def _wide_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.Tensor(tensor.numpy().astype(np.float64), name=tensor.name)
