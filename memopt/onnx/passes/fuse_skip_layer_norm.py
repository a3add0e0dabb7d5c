"""A residual sum and the layer normalization after it become ONNX Runtime's own operator."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from memopt.graph.rewrite import Refused
from memopt.onnx.edit import Edit
from memopt.onnx.read import argument, attribute, constant, is_standard, label, only_user, producer
from memopt.onnx.runtime_pass import OnnxRuntimePass
from memopt.onnx.symbolic import Symbols

_TYPES = {ir.DataType.FLOAT, ir.DataType.FLOAT16}


class FuseSkipLayerNorm(OnnxRuntimePass):
    """LayerNormalization(a + b) over the last of three axes becomes com.microsoft.SkipLayerNormalization(a, b).

    Cases:
        1. a and b have one shape. Where the sum is read elsewhere (by the next residual), it is the operator's last
           result.
        2. a or b is itself the sum of something that only this reads and a constant vector: the operator adds it.

    Refusals:
        - The shapes of a and b are not known to be the same three axes.
        - Scale or bias of the normalization are computed, or no vectors; its statistics are read; the sum is an output.
        - The sum is read elsewhere, and scale or bias are Constant nodes, which may come after it.
        - The type is none that the operator has kernels for.
    """

    name: ClassVar[str] = "fuse_skip_layer_norm"
    float32_only: ClassVar[bool] = True  # in float16 the two operators need no casts, and it does
    tolerance: ClassVar[float] = 4.0

    def rewrite(self, edit: Edit) -> None:
        """Walk the main graph in order."""
        symbols = Symbols(edit.model)
        for node in list(edit.model.graph):
            if node.graph is None or not is_standard(node, "LayerNormalization"):
                continue
            total = producer(node.inputs[0], "Add")
            if total is None:
                continue
            try:
                _fuse(edit, node, total, symbols)
            except Refused as reason:
                edit.refuse(node, str(reason))


def _fuse(edit: Edit, node: ir.Node, total: ir.Node, symbols: Symbols) -> None:
    shapes = [symbols.shapes.get(value) for value in total.inputs if value is not None]
    if len(shapes) != 2 or shapes[0] is None or shapes[0] != shapes[1] or len(shapes[0]) != 3:
        raise Refused(f"the operands of {label(total)} are not known to have one shape of three axes")
    if attribute(node, "axis", -1) not in (-1, 2):
        raise Refused("it does not normalize the last axis")
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        raise Refused("its statistics are read")
    if total.outputs[0].is_graph_output():
        raise Refused(f"the sum {total.outputs[0].name} is an output")
    vectors = [argument(node, place) for place in (1, 2)]
    for vector in vectors:
        array = constant(vector)
        if vector is not None and (array is None or array.ndim != 1):
            raise Refused(f"{vector.name} is computed, or no vector")
    if {value.dtype for value in (*total.inputs, *vectors) if value is not None} - _TYPES:
        raise Refused("ONNX Runtime's operator is for floating-point numbers of 16 and 32 bits")
    first, second, bias = _with_bias(total)
    shared = any(use.node is not node for use in total.outputs[0].uses())
    if shared and any(vector is not None and not vector.is_initializer() for vector in vectors):
        raise Refused("scale or bias are made by nodes, which may come after the sum that others read")
    inputs = [first, second, *vectors, *([bias] if bias is not None else [])]
    names = (label(total), label(node))
    new = edit.node(
        total if shared else node,  # what else reads the sum may come before the normalization
        "SkipLayerNormalization",
        inputs,
        {"epsilon": float(attribute(node, "epsilon", 1e-5))},
        stem=f"{names[1]}_skip",
        outputs=4 if shared else 1,
        domain="com.microsoft",
    )
    if shared:
        for value in new.outputs[1:3]:
            value.name = ""  # the statistics are left out
    sum_shape = symbols.shapes[total.outputs[0]]
    symbols.shapes[new.outputs[0]] = sum_shape
    edit.replace(node.outputs[0], new.outputs[0])
    edit.erase(node)
    if shared:
        symbols.shapes[new.outputs[3]] = sum_shape
        edit.replace(total.outputs[0], new.outputs[3])
        edit.erase(total)
    edit.change(f"{names[0]} and {names[1]} are one SkipLayerNormalization", names, (label(new),))


def _with_bias(total: ir.Node) -> tuple[ir.Value | None, ir.Value | None, ir.Value | None]:
    """The operands of the sum, and a constant vector that one of them ends with."""
    left, right = total.inputs
    for one, other in ((left, right), (right, left)):
        inner = producer(one, "Add")
        if inner is None or one is None or only_user(one) is not total:
            continue
        for place in (0, 1):
            array = constant(argument(inner, place))
            if array is not None and array.ndim == 1 and array.size > 1 and inner.graph is total.graph:
                return inner.inputs[1 - place], other, inner.inputs[place]
    return left, right, None
