"""A split into a sequence whose items are then picked becomes a Split."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from memopt.graph.rewrite import Refused
from memopt.onnx.edit import Edit
from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.read import argument, attribute, constant, dims, is_standard, label, opset


class SplitWithoutSequence(OnnxPass):
    """SplitToSequence whose items are all picked by constant index becomes a Split of the same parts.

    torch.split and torch.chunk are exported so. A Split runs everywhere, and its results have shapes that are known.

    Refusals:
        - The sequence itself is an output, or is read by anything but SequenceAt with a constant index.
        - The sizes of the parts are computed, or one number that has to be counted out along a dynamic axis.
        - Operator sets before 13; parts without their axis.
    """

    name: ClassVar[str] = "split_without_sequence"

    def rewrite(self, edit: Edit) -> None:
        """Walk each graph in order."""
        if opset(edit.model) < 13:
            return
        for graph in edit.graphs():
            for node in list(graph):
                if node.graph is None or not is_standard(node, "SplitToSequence"):
                    continue
                try:
                    _split(edit, node)
                except Refused as reason:
                    edit.refuse(node, str(reason))


def _split(edit: Edit, node: ir.Node) -> None:
    sequence, source = node.outputs[0], node.inputs[0]
    parts = _parts(node, source)
    if sequence.is_graph_output():
        raise Refused("the sequence is an output")
    picks: list[tuple[ir.Node, int]] = []
    for use in sequence.uses():
        index = constant(argument(use.node, 1)) if is_standard(use.node, "SequenceAt") else None
        if index is None or use.node.graph is not node.graph:
            raise Refused(f"{label(use.node)} reads the sequence")
        place = int(index.reshape(()))
        if not -len(parts) <= place < len(parts):
            raise Refused(f"{label(use.node)} picks item {place} of {len(parts)}")
        picks.append((use.node, place % len(parts)))
    if not picks:
        return
    graph = node.graph
    assert graph is not None
    name = label(node)
    sizes = edit.initializer(graph, f"{name}_sizes", np.asarray(parts, dtype=np.int64))
    axis = int(attribute(node, "axis", 0))
    new = edit.node(node, "Split", [source, sizes], {"axis": axis}, stem=f"{name}_split", outputs=len(parts))
    for pick, place in picks:
        item = new.outputs[place]
        old = pick.outputs[0]
        if edit.can_replace(old, item):
            edit.replace(old, item)
        else:
            edit.replace(old, edit.node(pick, "Identity", [item]).outputs[0])
        edit.erase(pick)
    edit.erase(node)
    edit.change(f"{name} is a Split into {len(parts)}", (name, *(label(pick) for pick, _ in picks)), (label(new),))


def _parts(node: ir.Node, source: ir.Value | None) -> list[int]:
    known, axis = dims(source), int(attribute(node, "axis", 0))
    length = None if known is None else known[axis]
    sizes: np.ndarray[Any, Any] | None = constant(argument(node, 1))
    if argument(node, 1) is None:
        if not attribute(node, "keepdims", 1):
            raise Refused("its parts have lost their axis")
        sizes = np.asarray(1)
    if sizes is None:
        raise Refused("the sizes of its parts are computed")
    if sizes.ndim:
        return [int(size) for size in sizes]
    each = int(sizes)
    if length is None or each <= 0:
        raise Refused("how many parts there are depends on a dynamic axis")
    return [min(each, length - start) for start in range(0, length, each)]
