"""Sizes of ONNX values, at given sizes of the axes that vary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir
import sympy  # type: ignore[import-untyped]

from memopt.onnx.read import graphs, is_standard
from memopt.onnx.symbolic import Symbols

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]  # by name of a value


def known_shapes(models: Sequence[ir.Model], sizes: Mapping[str, int]) -> dict[str, Shape]:
    """Shapes by name of a value, of all that is known in the first and the last of the models.

    A value keeps its name from pass to pass, and what the first leaves open the simpler last one often tells.

    Args:
        models: one model as passes rewrote it, in order.
        sizes: of the axes that vary, by name.
    """
    found: dict[str, Shape] = {}
    for model in (models[-1], *models[:1]):
        for value, dims in Symbols(model).shapes.items():
            shape = tuple(_size(dim, sizes) for dim in dims)
            if value.name and None not in shape:
                found.setdefault(value.name, tuple(size for size in shape if size is not None))
    for model in models:
        for graph in graphs(model):
            for value in (*graph.inputs, *(value for node in graph for value in node.outputs)):
                if value.name and value.shape is not None and value.shape.is_static():
                    found.setdefault(value.name, tuple(int(size) for size in value.shape.numpy()))
    for model in models:
        for graph in graphs(model):
            for node in graph:
                operand = shape_of(node.inputs[0], found) if node.inputs and is_standard(node, "Identity") else None
                if operand is not None and node.outputs[0].name:
                    found.setdefault(node.outputs[0].name, operand)
    return found


def _size(dim: Any, sizes: Mapping[str, int]) -> int | None:
    expression = sympy.Integer(dim) if isinstance(dim, int) else dim
    known = {symbol: sizes[symbol.name] for symbol in expression.free_symbols if symbol.name in sizes}
    found = expression.subs(known)
    return int(found) if found.is_Integer else None


def sizes_of(model: ir.Model, feeds: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of the axes that vary, by name, in arrays for the model's inputs."""
    found: dict[str, int] = {}
    for value in model.graph.inputs:
        array = feeds.get(str(value.name))
        if array is None or value.shape is None or len(value.shape) != array.ndim:
            continue
        for dim, size in zip(value.shape, array.shape, strict=True):
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                found.setdefault(str(dim.value), int(size))
    return found


def shape_of(value: ir.Value | None, shapes: Shapes) -> Shape | None:
    """The value's shape; None where it is not known."""
    if value is None:
        return None
    if value.const_value is not None:
        return tuple(int(size) for size in value.const_value.shape.numpy())
    return shapes.get(str(value.name))


def bytes_of_value(value: ir.Value | None, shapes: Shapes) -> int | None:
    """Bytes of the value's tensor; None where its shape or type is not known."""
    shape = shape_of(value, shapes)
    if value is None or shape is None or value.dtype is None or value.dtype is ir.DataType.STRING:
        return None
    return math.ceil(math.prod(shape) * value.dtype.bitwidth / 8)
