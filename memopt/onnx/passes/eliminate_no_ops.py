"""Remove nodes that pass on what they were given, and pairs that cancel."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from memopt.graph.rewrite import Refused
from memopt.onnx.edit import Edit
from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.read import (
    argument,
    attribute,
    constant,
    dims,
    dropout_is_off,
    integers,
    is_standard,
    label,
    only_user,
    opset,
    producer,
    scalar,
    static_shape,
)

# The most negative and largest ends that exporters write for "from the beginning" and "to the end".
_END = 2**31 - 1


class EliminateNoOps(OnnxPass):
    """Remove nodes whose result is one of their inputs, bit for bit.

    Cases:
        1. Identity; Dropout in evaluation mode, or at ratio 0, whose mask nobody reads.
        2. Cast or CastLike to the type that the input has. CastLike to another known type becomes a Cast.
        3. Transpose that keeps the order; two in a row become one, or none.
        4. Reshape, Flatten, Squeeze, Unsqueeze, Expand and Tile to the shape that the input has; of two Reshapes in a
           row the first goes.
        5. Slice from the beginning to the end in steps of 1; Pad by nothing; Concat, Sum, Max, Min and Mean of one
           input; Split into one; Concat without its empty inputs.
        6. x·1, x / 1, x - 0 and x ** 1, where the other side does not widen the shape. x + 0 stays: it turns -0 into 0.

    Refusals:
        - The input and the result both have names that are fixed: an output made from an input, an initializer, another
          output or a value of an outer graph.
        - A training-mode Dropout.
    """

    name: ClassVar[str] = "eliminate_no_ops"

    def rewrite(self, edit: Edit) -> None:
        """Walk each graph in order, so that chains collapse."""
        version = opset(edit.model)
        for graph in edit.graphs():
            for node in list(graph):
                if node.graph is None or not is_standard(node) or not node.outputs or not node.inputs:
                    continue
                try:
                    if _compose(edit, node):
                        continue
                    source = _passed_on(node, version)
                except Refused as reason:
                    edit.refuse(node, str(reason))
                    continue
                if source is not None:
                    _remove(edit, node, source)


def _remove(edit: Edit, node: ir.Node, source: ir.Value) -> None:
    value, name = node.outputs[0], label(node)
    if any(other.uses() or other.is_graph_output() for other in node.outputs[1:]):
        edit.refuse(node, "it passes its input on, but its other result is read")
    elif not edit.can_replace(value, source):
        edit.refuse(node, f"it passes {source.name} on, but {value.name} is an output, which needs a node of its own")
    else:
        described = f"{node.op_type} {name} passes on {source.name}"
        edit.replace(value, source)
        edit.erase(node)
        edit.change(described, (name,), (str(source.name),))


def _passed_on(node: ir.Node, version: int) -> ir.Value | None:
    """The input that is the node's first result; None when there is none. Raises Refused."""
    check = _CHECKS.get(node.op_type)
    found = None if check is None else check(node, version)
    if found is not None and found.type is not None and node.outputs[0].type is not None:
        kept = isinstance(found.type, ir.TensorType) == isinstance(node.outputs[0].type, ir.TensorType)
        return found if kept and found.dtype == node.outputs[0].dtype else None
    return found


_Check = Callable[[ir.Node, int], ir.Value | None]


def _identity(node: ir.Node, version: int) -> ir.Value | None:
    return argument(node, 0)


def _dropout(node: ir.Node, version: int) -> ir.Value | None:
    if dropout_is_off(node, version):
        return argument(node, 0)
    ratio = scalar(argument(node, 1)) if version >= 12 and argument(node, 1) is not None else None
    if ratio != 0.0:
        raise Refused("it may draw random numbers: it is not known to be in evaluation mode")
    return argument(node, 0)


def _cast(node: ir.Node, version: int) -> ir.Value | None:
    source = argument(node, 0)
    if source is None or source.dtype is None:
        return None
    return source if int(source.dtype) == attribute(node, "to", None) else None


def _cast_like(node: ir.Node, version: int) -> ir.Value | None:
    source, like = argument(node, 0), argument(node, 1)
    if source is None or like is None or source.dtype is None:
        return None
    return source if source.dtype is like.dtype else None


def _transpose(node: ir.Node, version: int) -> ir.Value | None:
    source = argument(node, 0)
    order = attribute(node, "perm", None)
    rank = len(dims(source) or ())
    if order is None:
        return source if dims(source) is not None and rank <= 1 else None
    return source if list(order) == sorted(order) else None


def _same_shape(node: ir.Node, version: int) -> ir.Value | None:
    """Static shapes only: a dynamic axis may be any size."""
    source = argument(node, 0)
    shape = static_shape(source)
    if node.op_type == "Reshape" and shape is None and _keeps_one_axis(node, source):
        return source
    return source if shape is not None and shape == static_shape(node.outputs[0]) else None


def _keeps_one_axis(node: ir.Node, source: ir.Value | None) -> bool:
    """Whether a Reshape names all axes of its input but at most one, which is -1, or 0: copied."""
    target, known = constant(argument(node, 1)), dims(source)
    if target is None or known is None or target.size != len(known) or attribute(node, "allowzero", 0):
        return False
    kept = [
        int(t) == 0 or (d is not None and int(t) == d and d > 0) for t, d in zip(target.reshape(-1), known, strict=True)
    ]
    missing = [int(t) for t, ok in zip(target.reshape(-1), kept, strict=True) if not ok]
    return missing in ([], [-1])


def _slice(node: ir.Node, version: int) -> ir.Value | None:
    try:
        starts, ends = integers(node, "starts", 1), integers(node, "ends", 2)
        axes, steps = integers(node, "axes", 3), integers(node, "steps", 4)
    except ValueError:
        return None
    if starts is None or ends is None:
        return None
    known = dims(argument(node, 0))
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = index if axes is None else axes[index]
        length = None if known is None else known[axis]
        whole = end >= _END or (length is not None and end >= length)
        if start != 0 or not whole or (steps is not None and steps[index] != 1):
            return None
    return argument(node, 0)


def _pad(node: ir.Node, version: int) -> ir.Value | None:
    try:
        pads = integers(node, "pads", 1)
    except ValueError:
        return None
    return argument(node, 0) if pads is not None and not any(pads) else None


def _single(node: ir.Node, version: int) -> ir.Value | None:
    return node.inputs[0] if len(node.inputs) == 1 else None


def _split(node: ir.Node, version: int) -> ir.Value | None:
    return argument(node, 0) if len(node.outputs) == 1 else None


def _neutral(node: ir.Node, version: int) -> ir.Value | None:
    left, right = argument(node, 0), argument(node, 1)
    if version < 7:
        return None  # broadcasting was an attribute
    wanted = 0.0 if node.op_type == "Sub" else 1.0
    pairs = [(left, right), (right, left)] if node.op_type == "Mul" else [(left, right)]
    for source, other in pairs:
        array = constant(other)
        if array is None or array.dtype.kind not in "fiu" or not array.size or not np.all(array == wanted):
            continue
        if node.op_type == "Sub" and array.dtype.kind == "f" and np.any(np.signbit(array)):
            continue  # x - (-0.0) is x + 0.0
        known = dims(source)
        if known is None or array.ndim > len(known):
            continue
        if all(size in (1, known[len(known) - array.ndim + axis]) for axis, size in enumerate(array.shape)):
            return source
    return None


_CHECKS: dict[str, _Check] = {
    "Identity": _identity,
    "Dropout": _dropout,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Transpose": _transpose,
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand", "Tile"), _same_shape),
    "Slice": _slice,
    "Pad": _pad,
    **dict.fromkeys(("Concat", "Sum", "Max", "Min", "Mean"), _single),
    "Split": _split,
    **dict.fromkeys(("Mul", "Div", "Sub", "Pow"), _neutral),
}


# -- pairs ------------------------------------------------------------------------------------------------------


def _compose(edit: Edit, node: ir.Node) -> bool:
    """Shorten a chain that ends in this node; the node may be a no-op afterwards, and is looked at again."""
    if node.op_type == "Transpose":
        return _transposes(edit, node)
    if node.op_type == "Reshape":
        _reshapes(edit, node)
    if node.op_type == "Concat":
        _empty_parts(edit, node)
    if node.op_type == "CastLike":
        return _name_type(edit, node)
    return False


def _transposes(edit: Edit, node: ir.Node) -> bool:
    first = producer(argument(node, 0), "Transpose")
    if first is None:
        return False
    second_order, first_order = attribute(node, "perm", None), attribute(first, "perm", None)
    rank = len(dims(argument(first, 0)) or second_order or first_order or ())
    if not rank:
        return False
    outer = list(second_order or range(rank)[::-1])
    inner = list(first_order or range(rank)[::-1])
    order = [inner[axis] for axis in outer]
    source = first.inputs[0]
    assert source is not None
    names = (label(first), label(node))
    if order == sorted(order):
        if not edit.can_replace(node.outputs[0], source):
            return False
        edit.replace(node.outputs[0], source)
        edit.erase(node)
        edit.change(f"{names[0]} and {names[1]} cancel", names, (str(source.name),))
        return True
    node.replace_input_with(0, source)
    node.attributes.add(ir.AttrInt64s("perm", order))
    edit.erase(first)
    edit.change(f"{names[0]} and {names[1]} are one", names, (names[1],))
    return True


def _reshapes(edit: Edit, node: ir.Node) -> None:
    """Of two Reshapes the first goes, unless the second copies axes of what the first makes."""
    first = producer(argument(node, 0), "Reshape", "Flatten", "Squeeze", "Unsqueeze")
    target = constant(argument(node, 1))
    if first is None or target is None or only_user(first.outputs[0]) is not node:
        return
    source = first.inputs[0]
    zero = bool(np.any(target == 0))
    if source is None or zero or attribute(node, "allowzero", 0):
        return
    names = (label(first), label(node))
    node.replace_input_with(0, source)
    edit.erase(first)
    edit.change(f"{names[0]} does nothing before {names[1]}", names, (names[1],))


# Where a Cast may saturate, which is an attribute of CastLike as well.
_EIGHT_BITS = ("FLOAT8", "FLOAT4")


def _name_type(edit: Edit, node: ir.Node) -> bool:
    """A CastLike to a known type becomes a Cast, which need not wait for the value that it looks at."""
    source, like = argument(node, 0), argument(node, 1)
    if source is None or like is None or source.dtype is None or like.dtype is None or source.dtype is like.dtype:
        return False
    if like.dtype.name.startswith(_EIGHT_BITS):
        return False
    name = label(node)
    cast = edit.node(node, "Cast", [source], {"to": int(like.dtype)}, stem=f"{name}_cast")
    edit.replace(node.outputs[0], cast.outputs[0])
    edit.erase(node)
    edit.change(f"{name} casts to {like.dtype.name}", (name,), (label(cast),))
    return True


def _empty_parts(edit: Edit, node: ir.Node) -> None:
    """Leave out inputs of a Concat that have no elements along its axis."""
    axis = attribute(node, "axis", None)
    shapes = [static_shape(value) for value in node.inputs]
    if axis is None or any(shape is None or not -len(shape) <= axis < len(shape) for shape in shapes):
        return
    kept = [value for value, shape in zip(node.inputs, shapes, strict=True) if shape is not None and shape[axis]]
    if not kept or len(kept) == len(node.inputs):
        return
    dropped = len(node.inputs) - len(kept)
    removed = [value for value, shape in zip(node.inputs, shapes, strict=True) if shape is not None and not shape[axis]]
    for index in range(len(node.inputs)):
        node.replace_input_with(index, kept[index] if index < len(kept) else None)
    node.resize_inputs(len(kept))
    for value in removed:
        made = None if value is None else value.producer()
        if made is not None:
            edit.erase(made)
    edit.change(f"{label(node)} does without {dropped} empty inputs", (label(node),), (label(node),))
