"""Attention that is written out becomes the standard operator."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from memopt.graph.rewrite import Refused
from memopt.onnx.attention import Attention, check, fuse_each
from memopt.onnx.edit import Edit
from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.read import attribute, label, opset, producer
from memopt.onnx.symbolic import Symbols


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
        fuse_each(edit, _fuse)


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
