"""A residual sum and the root-mean-square normalization after it become ONNX Runtime's own operator."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from memopt.graph.rewrite import Refused
from memopt.onnx.edit import Edit
from memopt.onnx.match import Match, find
from memopt.onnx.passes.fuse_normalization import RMS, read_parts
from memopt.onnx.read import constant, is_standard, label, producer
from memopt.onnx.runtime_pass import OnnxRuntimePass
from memopt.onnx.symbolic import Symbols

_TYPES = {ir.DataType.FLOAT, ir.DataType.FLOAT16}


class FuseSkipRmsNorm(OnnxRuntimePass):
    """With t = a + b, t / √(mean(t²) + ε) · scale over the last of three axes becomes one operator.

    It is com.microsoft.SkipSimplifiedLayerNormalization(a, b, scale). Where the sum is read elsewhere (by the next
    residual), it is the operator's last result.

    Refusals:
        - The shapes of a and b are not known to be the same three axes; the sum is an output.
        - A result in the middle has other users, or is an output.
        - The mean runs over other axes than the last; scale or ε are computed, or scale is no vector.
        - The sum is read elsewhere, and scale is made by a node, which may come after it.
        - The type is none that the operator has kernels for, or changes on the way.
    """

    name: ClassVar[str] = "fuse_skip_rms_norm"
    tolerance: ClassVar[float] = 4.0

    def rewrite(self, edit: Edit) -> None:
        """Walk the main graph in order."""
        symbols = Symbols(edit.model)
        for node in list(edit.model.graph):
            match = find(node, RMS) if node.graph is not None and is_standard(node, "Mul") else None
            total = None if match is None else producer(match.values["x"], "Add")
            if match is None or total is None:
                continue
            try:
                _fuse(edit, node, match, total, symbols)
            except Refused as reason:
                edit.refuse(node, f"normalizes a sum by its root mean square, but {reason}")


def _fuse(edit: Edit, node: ir.Node, match: Match, total: ir.Node, symbols: Symbols) -> None:
    x, scale = match.values["x"], match.values["scale"]
    shapes = [symbols.shapes.get(value) for value in total.inputs if value is not None]
    if len(shapes) != 2 or shapes[0] is None or shapes[0] != shapes[1] or len(shapes[0]) != 3:
        raise Refused(f"the operands of {label(total)} are not known to have one shape of three axes")
    if x.is_graph_output():
        raise Refused(f"the sum {x.name} is an output")
    other = match.outside_user()
    if other is not None:
        raise Refused(f"the result of {label(other)} has other users, or is an output")
    parts = read_parts(match, len(shapes[0]))  # the inference knows no shape after operators of this kind
    if parts.axis != 2:
        raise Refused("the mean runs over more than the last axis")
    array = constant(scale)
    if array is None or array.ndim != 1 or array.shape[0] != shapes[0][2]:
        raise Refused(f"{scale.name} is computed, or no vector of the last axis")
    types = {value.dtype for item in (total, *match.nodes) for value in (*item.outputs, scale)}
    if len(types) != 1 or types - _TYPES:
        raise Refused("the type is none that it takes, or changes on the way")
    inside = set(match.nodes)
    shared = any(use.node not in inside for use in x.uses())
    if shared and not scale.is_initializer():
        raise Refused("scale is made by a node, which may come after the sum that others read")
    names = (label(total), *match.names())
    new = edit.node(
        total if shared else node,  # what else reads the sum may come before the normalization
        "SkipSimplifiedLayerNormalization",
        [*total.inputs, scale],
        {"epsilon": parts.epsilon},
        stem=f"{label(node)}_skip",
        outputs=4 if shared else 1,
        domain="com.microsoft",
    )
    symbols.shapes[new.outputs[0]] = shapes[0]
    edit.replace(node.outputs[0], new.outputs[0])
    edit.erase(node)
    if shared:
        for value in new.outputs[1:3]:
            value.name = ""  # the statistics are left out
        symbols.shapes[new.outputs[3]] = shapes[0]
        edit.replace(x, new.outputs[3])
        edit.erase(total)
    edit.change(f"{len(names)} nodes are one SkipSimplifiedLayerNormalization", names, (label(new),))
