"""The arithmetic of ONNX nodes, at given sizes."""

from __future__ import annotations

import math

import onnx_ir as ir

from memopt.onnx.read import argument, attribute
from memopt.onnx.sizes import Shapes, shape_of

_PRODUCTS = {"MatMul", "FusedMatMul", "Gemm", "FusedGemm"}
_CONVOLUTIONS = {"Conv", "FusedConv"}
_COUNTED = {*_PRODUCTS, *_CONVOLUTIONS, "ConvTranspose", "Attention", "MultiHeadAttention"}


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
