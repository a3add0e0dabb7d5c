"""Constants that hide places from attention, brought within float16: -3.4e38 says no more than -65504 there."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from memopt.onnx.edit import Edit, drop_initializer
from memopt.onnx.read import constant, is_standard

_LEAST = float(np.finfo(np.float16).min)
_PASSING = ("Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
# Where an attention operator takes what is added to its scores.
_BIAS = {"Attention": 3, "MultiHeadAttention": 5}


def within_float16(edit: Edit) -> None:
    """Raise what Where picks for hidden places to float16's least number, where only softmaxes read it.

    Numbers that are added to scores and vanish in the exponential vanish there too: the scores themselves are above
    -65504 in float16. Constants that anything else reads stay as they are.
    """
    for node in list(edit.model.graph):
        if not is_standard(node, "Where") or not _hides(node.outputs[0], set()):
            continue
        for index in (1, 2):
            value = node.inputs[index]
            array = None if value is None else constant(value)
            if array is None or value is None or array.size != 1 or array.dtype != np.float32:
                continue
            if np.isfinite(array).all() and float(array.reshape(())) < _LEAST:
                least = edit.initializer(edit.model.graph, f"{value.name}_least", np.full_like(array, _LEAST))
                node.replace_input_with(index, least)
                drop_initializer(value)


def _hides(value: ir.Value, seen: set[ir.Value]) -> bool:
    """Whether all that is done with the value is to add it to what a softmax takes."""
    if value in seen:
        return True
    seen.add(value)
    uses = list(value.uses())
    if not uses or value.is_graph_output():
        return False
    for use in uses:
        node = use.node
        if node.op_type == "Softmax" or _BIAS.get(node.op_type) == use.idx:
            continue
        passes = is_standard(node, "Add") or (is_standard(node, *_PASSING) and use.idx == 0)
        if not passes or not _hides(node.outputs[0], seen):
            return False
    return True
