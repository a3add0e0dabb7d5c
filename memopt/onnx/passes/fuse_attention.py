"""Attention that is written out becomes the standard operator."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from memopt.onnx.attention import Attention, attention
from memopt.onnx.edit import Edit
from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.read import attribute, is_standard, label, opset, producer
from memopt.onnx.symbolic import Symbols
from memopt.rewrite import Refused


class FuseAttention(OnnxPass):
    """softmax(scale · q kᵀ + mask) v on four axes becomes Attention, from operator set 23 on; the main graph only.

    Cases:
        1. kᵀ is a Transpose of the last two axes, which goes; the scale is one number on the scores, on q, on kᵀ, or in
           parts on several of them.
        2. A mask that is added, of as many rows and columns as the scores; none.
        3. A guard that turns NaN into 0 after the softmax, where there is no mask, or one of finite numbers: it would
           act on scores that are not finite only.

    Refusals:
        - A result in the middle has other users, or is an output.
        - The mask's rows or columns are not known to be those of the scores.
        - The guard stands behind a mask that may hold infinity.
    """

    name: ClassVar[str] = "fuse_attention"
    tolerance: ClassVar[float] = 4.0

    def rewrite(self, edit: Edit) -> None:
        """Walk the main graph in order."""
        if opset(edit.model) < 23:
            return
        symbols = Symbols(edit.model)
        for node in list(edit.model.graph):
            if node.graph is None or not is_standard(node, "MatMul"):
                continue
            try:
                found = attention(node)
                if found is not None:
                    _fuse(edit, node, found, symbols)
            except Refused as reason:
                edit.refuse(node, f"is attention, but {reason}")


def _fuse(edit: Edit, node: ir.Node, found: Attention, symbols: Symbols) -> None:
    check(found, symbols)
    turn = producer(found.turned, "Transpose")
    if turn is None or tuple(attribute(turn, "perm", ())) != (0, 1, 3, 2):
        raise Refused("its keys are not turned by a Transpose")
    inputs = [found.q, turn.inputs[0], found.v]
    if found.mask is not None:
        inputs.append(found.mask)
    names = tuple(label(item) for item in reversed(found.nodes))
    new = edit.node(node, "Attention", inputs, {"scale": found.scale}, stem=f"{label(node)}_attention")
    edit.replace(node.outputs[0], new.outputs[0])
    edit.erase(node)
    edit.change(f"{len(names)} nodes are Attention", names, (label(new),))


def check(found: Attention, symbols: Symbols) -> None:
    """Raise Refused unless nothing inside is read outside, and the mask has the scores' rows and columns."""
    other = found.outside_user()
    if other is not None:
        raise Refused(f"the result of {label(other)} has other users, or is an output")
    shapes = [symbols.shapes.get(value) for value in (found.q, found.turned, found.v)]
    if any(shape is None or len(shape) != 4 for shape in shapes):
        raise Refused("the shapes of q, k and v are not known")
    q, turned, v = (shape for shape in shapes if shape is not None)
    if not (q[0] == turned[0] == v[0] and q[1] == turned[1] == v[1] and turned[3] == v[2] and q[3] == turned[2]):
        raise Refused("batch, heads and lengths of q, k and v are not known to agree")
    if found.mask is None:
        return
    mask = symbols.shapes.get(found.mask)
    if (
        mask is None
        or len(mask) != 4
        or mask[2:] != (q[2], v[2])
        or mask[0] not in (1, q[0])
        or mask[1] not in (1, q[1])
    ):
        raise Refused(f"the shape of its mask, {mask}, is not known to be that of the scores")
