"""The graph in float16, with operators that lose too much there kept in float32; inputs and outputs keep theirs."""

from __future__ import annotations

import copy

import numpy as np
import onnx_ir as ir

from memopt.convert.errors import ConversionError
from memopt.convert.write import SINGLE_FILE_BYTES, weight_bytes

# Sums of many terms, and functions whose result falls out of float16's range where their operand does not.
SENSITIVE = (
    "Softmax", "LogSoftmax", "LayerNormalization", "GroupNormalization", "InstanceNormalization", "RMSNormalization",
    "BatchNormalization", "ReduceMean", "ReduceSum", "ReduceL2", "Pow", "Exp", "Log", "Sqrt", "Reciprocal", "Div",
    "IsNaN", "CumSum", "Sin", "Cos",
)  # fmt: skip
_LARGEST = 65504.0
# What rounding to float16 may change, as a share of an output's largest value: sixteen units in its last place.
ALLOWED = 16 * 2.0**-10


def narrowed(model: ir.Model) -> ir.Model:
    """Return the model with float16 weights and operators, by ONNX Runtime's own conversion.

    Raises:
        ConversionError: a weight does not fit into float16, or the weights are too large to be converted.
    """
    from onnxruntime.transformers.float16 import (  # type: ignore[import-untyped]
        DEFAULT_OP_BLOCK_LIST,
        convert_float_to_float16,
    )

    if weight_bytes(model) > SINGLE_FILE_BYTES:
        raise ConversionError(f"weights above {SINGLE_FILE_BYTES} bytes cannot be converted to float16")
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.dtype is ir.DataType.FLOAT and value.const_value is not None:
                array = value.const_value.numpy()
                if (np.isfinite(array) & (np.abs(array) > _LARGEST) & (np.abs(array) < 3e38)).any():
                    raise ConversionError(f"{value.name} holds values above {_LARGEST:g}, which float16 cannot hold")
    proto = convert_float_to_float16(
        ir.to_proto(model),
        keep_io_types=True,
        max_finite_val=_LARGEST,
        op_block_list=[*DEFAULT_OP_BLOCK_LIST, *SENSITIVE],
    )
    # It casts a weight that several nodes read once for each, to the same name, and puts casts at the end.
    nodes = {tuple(node.output): node for node in proto.graph.node}
    proto.graph.ClearField("value_info")  # the types of before
    kept = [copy.deepcopy(node) for node in nodes.values()]
    proto.graph.ClearField("node")
    proto.graph.node.extend(kept)
    result: ir.Model = ir.from_proto(proto)
    result.graph.sort()
    return result
