"""Remove biases that add nothing."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from memopt.onnx.constants import evaluated
from memopt.onnx.edit import Edit, drop_initializer
from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.read import argument, constant, is_standard, label, opset

# The operators, and the first operator set in which their third input is optional.
_OPTIONAL_SINCE = {"Conv": 1, "ConvTranspose": 1, "Gemm": 11}


class DropZeroBias(OnnxPass):
    """Remove the bias of a Conv, ConvTranspose or Gemm where it is zero everywhere.

    Exporters give a convolution without bias one of zeros. A bias may be computed from constants (an Expand of 0):
    what computes it goes with it.

    Refusals:
        - The bias is not known: it is computed, or a caller may override it.
        - It is not zero everywhere. Neither is noted: nearly every layer is of that kind.
    """

    name: ClassVar[str] = "drop_zero_bias"
    # An engine may choose another kernel where there is no bias.
    tolerance: ClassVar[float] = 4.0

    def rewrite(self, edit: Edit) -> None:
        """Walk each graph in order."""
        version = opset(edit.model)
        layers = [
            node
            for graph in edit.graphs()
            for node in graph
            if is_standard(node, *_OPTIONAL_SINCE)
            and version >= _OPTIONAL_SINCE[node.op_type]
            and argument(node, 2) is not None
        ]
        known = evaluated(edit.model) if any(constant(argument(node, 2)) is None for node in layers) else {}
        for node in layers:
            bias = argument(node, 2)
            assert bias is not None
            array = constant(bias)
            array = known.get(bias) if array is None else array
            if array is not None and not np.any(array):
                _drop(edit, node, bias)


def _drop(edit: Edit, node: ir.Node, bias: ir.Value) -> None:
    node.replace_input_with(2, None)
    node.resize_inputs(2)
    made = bias.producer()
    if made is not None:
        edit.erase(made)
    else:
        drop_initializer(bias)
    name = label(node)
    edit.change(f"{name} does without {bias.name}, which is zero", (name,), (name,))
