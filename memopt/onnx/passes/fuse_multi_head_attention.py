"""Attention that is written out becomes ONNX Runtime's own operator."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir
import sympy  # type: ignore[import-untyped]

from memopt.graph.rewrite import Refused
from memopt.onnx.attention import Attention, check, fuse_each
from memopt.onnx.edit import Edit
from memopt.onnx.read import attribute, is_standard, label, only_user, producer
from memopt.onnx.runtime_pass import OnnxRuntimePass
from memopt.onnx.symbolic import Dim, Symbols

_HEADS_FIRST = (0, 2, 1, 3)


class FuseMultiHeadAttention(OnnxRuntimePass):
    """Attention with its heads split off before and joined after becomes com.microsoft.MultiHeadAttention.

    Algebra: q, k and v of shape [batch, length, heads · features] are each reshaped to [batch, length, heads, features]
    and turned heads first; softmax(scale · q kᵀ + mask) v is turned back and reshaped to [batch, length, heads ·
    features]. The operator does all of it, without the scores of all heads at once where it can.

    Cases and refusals are those of `memopt.onnx.passes.fuse_attention`, but for the operator set, and:
        - The heads are not split off and joined so, as far as the shapes are known; values are not as wide as queries.
    """

    name: ClassVar[str] = "fuse_multi_head_attention"
    tolerance: ClassVar[float] = 4.0

    def rewrite(self, edit: Edit) -> None:
        """Walk the main graph in order."""
        fuse_each(edit, _fuse)


def _fuse(edit: Edit, node: ir.Node, found: Attention, symbols: Symbols) -> None:
    check(found, symbols)
    turn = producer(found.turned, "Transpose")
    order = () if turn is None else tuple(attribute(turn, "perm", ()))
    if turn is not None and order == (0, 1, 3, 2):
        keys = _split_off(turn.inputs[0], _HEADS_FIRST, symbols)
    else:
        keys = _split_off(found.turned, (0, 2, 3, 1), symbols)
    query, values = (_split_off(value, _HEADS_FIRST, symbols) for value in (found.q, found.v))
    back = only_user(node.outputs[0])
    joined = None if back is None else only_user(back.outputs[0])
    if back is None or joined is None or not is_standard(back, "Transpose") or not is_standard(joined, "Reshape"):
        raise Refused("its heads are not joined by a Transpose and a Reshape")
    split = symbols.shapes[found.q]
    heads, width = split[1], symbols.shapes[found.v][3]
    wanted: tuple[Dim, ...] = (split[0], split[2], heads * width)
    if tuple(attribute(back, "perm", ())) != _HEADS_FIRST or symbols.shapes.get(joined.outputs[0]) != wanted:
        raise Refused("its heads are not joined to batch, length and features, as far as the shapes are known")
    if width != split[3]:
        raise Refused(f"its values have {width} features, its queries {split[3]}")
    inputs: list[ir.Value | None] = [query, keys, values]
    if found.mask is not None:
        inputs += [None, None, _four_axes(edit, joined, found.mask, symbols)]
    nodes = (joined, back, *found.nodes)
    new = edit.node(
        joined,
        "MultiHeadAttention",
        inputs,
        {"num_heads": int(heads), "scale": found.scale},
        stem=f"{label(node)}_attention",
        domain="com.microsoft",
    )
    symbols.shapes[new.outputs[0]] = wanted
    names = tuple(label(item) for item in reversed(nodes))
    edit.replace(joined.outputs[0], new.outputs[0])
    edit.erase(joined)
    edit.change(f"{len(names)} nodes are MultiHeadAttention", names, (label(new),))


def _four_axes(edit: Edit, node: ir.Node, mask: ir.Value, symbols: Symbols) -> ir.Value:
    """The mask as the operator takes it: with axes for batch and heads. One that many layers read is turned once."""
    shape = symbols.shapes[mask]
    missing = 4 - len(shape)
    if not missing:
        return mask
    for user, _ in mask.uses():
        if is_standard(user, "Unsqueeze") and symbols.shapes.get(user.outputs[0]) == ((1,) * missing + shape):
            return user.outputs[0]
    assert node.graph is not None
    axes = edit.initializer(node.graph, f"{mask.name}_axes", np.arange(missing, dtype=np.int64))
    made = edit.node(mask.producer() or node, "Unsqueeze", [mask, axes], stem=f"{mask.name}_four_axes")
    producer_of_mask = mask.producer()
    if producer_of_mask is not None:
        node.graph.remove(made)
        node.graph.insert_after(producer_of_mask, made)
    symbols.shapes[made.outputs[0]] = (sympy.Integer(1),) * missing + shape
    return made.outputs[0]


def _split_off(value: ir.Value | None, order: tuple[int, ...], symbols: Symbols) -> ir.Value:
    """What the heads are split off: [batch, length, heads · features]. Raises Refused."""
    turned = producer(value, "Transpose")
    split = producer(turned.inputs[0], "Reshape") if turned is not None else None
    source = None if split is None else split.inputs[0]
    if turned is None or split is None or source is None or tuple(attribute(turned, "perm", ())) != order:
        raise Refused("its heads are not split off by a Reshape and a Transpose")
    before, after = symbols.shapes.get(source), symbols.shapes.get(split.outputs[0])
    if before is None or after is None or len(before) != 3 or len(after) != 4:
        raise Refused("its heads are not split off three axes")
    if (
        before[:2] != after[:2]
        or not after[2].is_Integer
        or not after[3].is_Integer
        or before[2] != after[2] * after[3]
    ):
        raise Refused("its heads are not split off the last axis, as far as the shapes are known")
    return source
