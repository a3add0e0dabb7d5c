"""Shapes as expressions in the model's dynamic axes, and small integer tensors as the expressions that they hold.

ONNX's own inference follows names of axes through operators that hand them on, and gives up on most of what exporters
write between a Shape and a Reshape. Here such integers are followed as sums and products, and what they say of the
shapes behind Reshape, Expand, Slice and Range goes back into the inference, node by node.

Two things are taken on trust, as the ONNX standard lets one: axes of the inputs that have one name have one size, and
the model is run on inputs that it accepts (where a broadcast would fail, any shape may follow). Axes of length 0 aside.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
import sympy  # type: ignore[import-untyped]

from memopt.onnx.read import argument, attribute, constant, is_standard, opset, producer, scalar

Dim: TypeAlias = Any  # a sympy.Expr, which has no types
# Longer integer tensors are no shapes.
_MOST = 64
# Ends of slices from here on mean the end of the axis.
_END = 2**31 - 1
_BROADCAST = {
    "Add", "And", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater", "GreaterOrEqual", "Less",
    "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "Pow", "Sub", "Sum", "Where", "Xor",
}  # fmt: skip
# Operators of ONNX Runtime, which the inference does not know, whose results have the shape of their first input; an
# attention's do where its values are as wide as its queries, which is how it is made here.
_SAME_SHAPE = {"MultiHeadAttention", "QuickGelu", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
_HOLDING = {"Squeeze", "Unsqueeze", "Reshape", "Identity", "Cast", "CastLike", "Flatten"}


class Symbols:
    """What is known of the values of a model's main graph.

    Attributes:
        shapes: the dimensions of a value.
        data: what an integer tensor of at most one axis holds, in order.
    """

    def __init__(self, model: ir.Model) -> None:
        """Walk the main graph in order."""
        self.shapes: dict[ir.Value, tuple[Dim, ...]] = {}
        self.data: dict[ir.Value, tuple[Dim, ...]] = {}
        self._version = opset(model)
        self._fresh = (sympy.Symbol(f"?{number}", integer=True, nonnegative=True) for number in itertools.count())
        self._names: dict[str, Dim] = {}
        for value in model.graph.inputs:
            if value.shape is not None:
                self.shapes[value] = tuple(self._declared(dim) for dim in value.shape)
        for value in model.graph.initializers.values():
            self._constant(value)
        for node in model.graph:
            self._visit(node)

    # -- one node ----------------------------------------------------------------------------------------------------

    def _visit(self, node: ir.Node) -> None:
        if node.domain == "com.microsoft" and node.op_type in _SAME_SHAPE and node.inputs[0] in self.shapes:
            for value in node.outputs:
                self.shapes[value] = self.shapes[node.inputs[0]]
        if not is_standard(node) or not node.outputs:
            return
        value = node.outputs[0]
        if is_standard(node, "Constant"):
            self._constant(value)
            return
        shape = self._shape(node)
        if shape is not None:
            self.shapes[value] = shape
        else:
            self._infer(node)
        data = self._data(node)
        if data is not None and len(data) <= _MOST and self._holds_integers(value):
            self.data[value] = data
            if len(self.shapes.get(value, ())) == 1:
                self.shapes[value] = (sympy.Integer(len(data)),)

    def _constant(self, value: ir.Value) -> None:
        array = constant(value)
        if array is None:
            return
        self.shapes[value] = tuple(sympy.Integer(size) for size in array.shape)
        if array.dtype.kind in "iu" and array.ndim <= 1 and array.size <= _MOST:
            self.data[value] = tuple(sympy.Integer(int(item)) for item in array.reshape(-1))

    def _holds_integers(self, value: ir.Value) -> bool:
        rank = len(self.shapes.get(value, (0, 0)))
        return rank <= 1 and value.dtype in (ir.DataType.INT64, ir.DataType.INT32)

    # -- what an integer tensor holds --------------------------------------------------------------------------------

    def _data(self, node: ir.Node) -> tuple[Dim, ...] | None:
        first = argument(node, 0)
        if first is None:
            return None
        if node.op_type == "Shape":
            shape = self.shapes.get(first)
            if shape is None or self._version < 15:
                return shape
            return shape[slice(attribute(node, "start", 0), attribute(node, "end", None))]
        given = [None if value is None else self.data.get(value) for value in node.inputs]
        data = given[0]
        if data is None:
            return None
        if node.op_type in _HOLDING:
            return data
        if node.op_type == "Gather" and len(given) > 1:
            places = _integers(given[1])
            if places is None or any(not -len(data) <= place < len(data) for place in places):
                return None
            return tuple(data[place] for place in places)
        if node.op_type == "Slice" and self._version >= 10:
            return _cut(data, given)
        if any(part is None for part in given):
            return None
        parts = [part for part in given if part is not None]
        if node.op_type == "Concat":
            return tuple(itertools.chain(*parts))
        return _arithmetic(node.op_type, parts)

    # -- shapes ------------------------------------------------------------------------------------------------------

    def _shape(self, node: ir.Node) -> tuple[Dim, ...] | None:
        """The first result's shape by a rule of this file; None where there is none."""
        first, second = argument(node, 0), argument(node, 1)
        shape = None if first is None else self.shapes.get(first)
        target = None if second is None else self.data.get(second)
        if node.op_type == "Expand" and shape is not None and target is not None:
            return self._broadcast([shape, target])
        if node.op_type in _BROADCAST:
            shapes = [None if value is None else self.shapes.get(value) for value in node.inputs]
            return None if None in shapes else self._broadcast([item for item in shapes if item is not None])
        if node.op_type == "Reshape" and shape is not None and target is not None:
            return self._reshaped(shape, target, bool(attribute(node, "allowzero", 0)))
        if node.op_type == "Slice" and shape is not None and self._version >= 10:
            return self._sliced(node, shape)
        if node.op_type == "ConstantOfShape" and first is not None:
            return self.data.get(first)
        if node.op_type == "Tile" and shape is not None:
            repeats = None if node.inputs[1] is None else self.data.get(node.inputs[1])
            if repeats is not None and len(repeats) == len(shape):
                return tuple(size * count for size, count in zip(shape, repeats, strict=True))
        if node.op_type == "Range":
            parts = [None if value is None else self._whole(value) for value in node.inputs]
            if len(parts) == 3 and parts[0] == (0,) and parts[1] is not None and parts[2] == (1,):
                return parts[1]
        return None

    def _whole(self, value: ir.Value) -> tuple[Dim, ...] | None:
        """What a tensor of whole numbers holds, be they floats: a length that was cast, or a constant."""
        if value in self.data:
            return self.data[value]
        node = producer(value, "Cast", "CastLike")
        if node is not None and value.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            return None if node.inputs[0] is None else self._whole(node.inputs[0])
        number = scalar(value)
        return None if number is None or number != int(number) else (sympy.Integer(int(number)),)

    def _broadcast(self, shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
        rank = max(len(shape) for shape in shapes)
        found = []
        for axis in range(-rank, 0):
            dim: Dim = sympy.Integer(1)
            for shape in shapes:
                if -axis <= len(shape):
                    dim = self._together(dim, shape[axis])
            found.append(dim)
        return tuple(found)

    def _together(self, a: Dim, b: Dim) -> Dim:
        """The size that two sizes broadcast to, given that they do."""
        if a == b or b == 1:
            return a
        if a == 1:
            return b
        for one, other in ((a, b), (b, a)):
            if one.is_Integer:
                return one
            # min(n, 512) and n: were n above 512 they would not broadcast.
            if (
                isinstance(other, sympy.Min)
                and one in other.args
                and all(part == one or (part.is_Integer and part > 1) for part in other.args)
            ):
                return one
        return next(self._fresh)

    def _reshaped(self, shape: tuple[Dim, ...], target: tuple[Dim, ...], keep_zero: bool) -> tuple[Dim, ...] | None:
        found: list[Dim | None] = []
        for index, size in enumerate(target):
            if size == 0 and not keep_zero:
                if index >= len(shape):
                    return None
                found.append(shape[index])
            else:
                found.append(None if size == -1 else size)
        if found.count(None) > 1:
            return None
        rest = sympy.prod([size for size in found if size is not None])
        if None in found:
            if rest == 0:
                return None
            quotient = sympy.cancel(sympy.prod(shape) / rest)
            whole = quotient.is_Integer or (quotient.is_polynomial() and quotient.is_integer)
            found[found.index(None)] = quotient if whole else next(self._fresh)
        return tuple(size for size in found if size is not None)

    def _sliced(self, node: ir.Node, shape: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
        parts = [None if value is None else self.data.get(value) for value in node.inputs[1:]]
        if len(parts) < 2 or parts[0] is None or parts[1] is None:
            return None
        axes = _integers(parts[2]) if len(parts) > 2 and argument(node, 3) is not None else list(range(len(parts[0])))
        steps = parts[3] if len(parts) > 3 and argument(node, 4) is not None else (sympy.Integer(1),) * len(parts[0])
        if axes is None or steps is None:
            return None
        found = list(shape)
        for axis, start, end, step in zip(axes, parts[0], parts[1], steps, strict=True):
            found[axis] = self._cut_length(shape[axis], start, end, step)
        return tuple(found)

    def _cut_length(self, size: Dim, start: Dim, end: Dim, step: Dim) -> Dim:
        if step == 1 and start == 0:
            if end.is_Integer and end >= _END:
                return size
            if end.is_nonnegative:
                return sympy.Min(size, end)
        if all(item.is_Integer for item in (size, start, end, step)) and step != 0:
            return sympy.Integer(len(range(*slice(int(start), int(end), int(step)).indices(int(size)))))
        return next(self._fresh)

    # -- everything else, by ONNX's inference -------------------------------------------------------------------------

    def _infer(self, node: ir.Node) -> None:
        types: dict[str, onnx.TypeProto] = {}
        data: dict[str, onnx.TensorProto] = {}
        for value in node.inputs:
            if value is None:
                continue
            if not isinstance(value.type, ir.TensorType) or value.dtype is None or not value.name:
                return
            shape = self.shapes.get(value)
            sizes = None if shape is None else [int(dim) if dim.is_Integer else self._named(dim) for dim in shape]
            types[value.name] = onnx.helper.make_tensor_type_proto(int(value.dtype), sizes)
            known = _integers(self.data.get(value))
            # A shape may be open, or contradict the data: what a model declares need not be so.
            fixed = [size for size in sizes or () if isinstance(size, int)]
            if known is not None and sizes is not None and len(fixed) == len(sizes) and math.prod(fixed) == len(known):
                array = np.asarray(known, dtype=value.dtype.numpy()).reshape(fixed)
                data[value.name] = onnx.numpy_helper.from_array(array, value.name)
        try:
            schema = onnx.defs.get_schema(node.op_type, self._version, node.domain)
            imports = [onnx.helper.make_opsetid("", self._version)]
            found = onnx.shape_inference.infer_node_outputs(
                schema, ir.to_proto(node), types, data, opset_imports=imports, ir_version=10
            )
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, onnx.defs.SchemaError, RuntimeError):
            return  # nothing is known of the results then
        for value in node.outputs:
            kind = found.get(value.name or "")
            if kind is not None and kind.tensor_type.HasField("shape"):
                self.shapes[value] = tuple(self._read(dim) for dim in kind.tensor_type.shape.dim)

    def _named(self, dim: Dim) -> str:
        self._names[str(dim)] = dim
        return str(dim)

    def _read(self, dim: onnx.TensorShapeProto.Dimension) -> Dim:
        if dim.HasField("dim_value"):
            return sympy.Integer(dim.dim_value)
        return self._names.get(dim.dim_param) or next(self._fresh)

    def _declared(self, dim: object) -> Dim:
        if isinstance(dim, int):
            return sympy.Integer(dim)
        name = getattr(dim, "value", None)
        return sympy.Symbol(name, integer=True, nonnegative=True) if name else next(self._fresh)


def _integers(data: tuple[Dim, ...] | None) -> list[int] | None:
    if data is None or not all(item.is_Integer for item in data):
        return None
    return [int(item) for item in data]


def _cut(data: tuple[Dim, ...], given: Sequence[tuple[Dim, ...] | None]) -> tuple[Dim, ...] | None:
    bounds = [_integers(part) for part in given[1:3]]
    if len(bounds) < 2 or any(part is None or len(part) != 1 for part in bounds):
        return None
    step = _integers(given[4]) if len(given) > 4 and given[4] is not None else [1]
    if (len(given) > 4 and given[4] is None) or step is None or step == [0]:
        return None
    (start,), (end,) = (part for part in bounds if part is not None)
    return data[slice(start, end, step[0])] if step[0] > 0 else None


def _arithmetic(operator: str, parts: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...] | None:
    if len(parts) != 2 or operator not in ("Add", "Sub", "Mul", "Div", "Min", "Max"):
        return None
    length = max(len(part) for part in parts)
    if any(len(part) not in (1, length) for part in parts):
        return None
    left, right = (part * length if len(part) == 1 else part for part in parts)
    found = []
    for a, b in zip(left, right, strict=True):
        if operator == "Add":
            found.append(a + b)
        elif operator == "Sub":
            found.append(a - b)
        elif operator == "Mul":
            found.append(sympy.expand(a * b))
        elif operator in ("Min", "Max"):
            found.append((sympy.Min if operator == "Min" else sympy.Max)(a, b))
        elif a.is_Integer and b.is_Integer and a >= 0 and b > 0:
            found.append(a // b)
        else:
            return None
    return tuple(found)
