"""Random inputs for a model: several shapes where axes are dynamic, indices that stay inside their tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from memopt.onnx.read import argument, constant, dims, is_standard

# Sizes that dynamic axes take in turn: the first named axis of a sample gets the first size, the next the second …
_SIZES = ((2, 6, 5, 4, 3), (1, 3, 7, 2, 5), (3, 8, 4, 6, 2))
# When a model runs on none of these, one size for every dynamic axis is tried.
_EQUAL_SIZES = (4, 8, 1, 64, 400)
# Inputs of more elements than this together are not made up.
_MOST_ELEMENTS = 1 << 24


class UnknownInput(ValueError):
    """No value can be made up for an input; the message names it and says why."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One set of inputs: `axes` says which size each named dynamic axis has."""

    feeds: Mapping[str, Any]
    axes: Mapping[str, int]

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes.items()) or "fixed shapes"


def samples(model: ir.Model, count: int = 2) -> list[Sample]:
    """Make up `count` sets of inputs with different sizes of the dynamic axes, then some with all sizes equal.

    Floats are drawn from the normal distribution; integers stay below the length of every table that they index, and
    are 0 or 1 where they index none. Which of them the model really runs on is for the caller to try.

    Raises:
        UnknownInput: an input has a type or a rank that values cannot be made up for, or all of them are too large.
    """
    inputs = [value for value in model.graph.inputs if not value.is_initializer()]
    limits = {id(value): _limit(value) for value in inputs}
    names: dict[str, None] = {}
    for value in inputs:
        for index, dim in enumerate(_shape(value)):
            if not isinstance(dim, int):
                names.setdefault(_axis(value, index, dim))
    choices: list[Sequence[int]] = [_SIZES[index % len(_SIZES)] for index in range(count)]
    if names:
        choices += [(size,) for size in _EQUAL_SIZES]
    found = []
    for number, sizes in enumerate(choices):
        random = np.random.default_rng(number)
        axes = {name: sizes[index % len(sizes)] for index, name in enumerate(names)}
        if sum(math.prod(_sizes(value, axes)) for value in inputs) > _MOST_ELEMENTS:
            continue
        feeds = {str(value.name): _value(value, axes, limits[id(value)], random) for value in inputs}
        found.append(Sample(feeds, axes))
    if not found:
        raise UnknownInput(f"the inputs have more than {_MOST_ELEMENTS} elements")
    return found


def _sizes(value: ir.Value, axes: Mapping[str, int]) -> list[int]:
    return [dim if isinstance(dim, int) else axes[_axis(value, i, dim)] for i, dim in enumerate(_shape(value))]


def _shape(value: ir.Value) -> list[int | str | None]:
    kind = value.type
    if not isinstance(kind, ir.TensorType):
        raise UnknownInput(f"input {value.name} is no tensor")
    if value.shape is None:
        raise UnknownInput(f"input {value.name} has no declared rank")
    return [item if isinstance(item, int) else item.value for item in value.shape]


def _axis(value: ir.Value, index: int, name: str | None) -> str:
    return name or f"{value.name}[{index}]"


def _value(value: ir.Value, axes: Mapping[str, int], limit: int, random: np.random.Generator) -> Any:
    shape = _sizes(value, axes)
    assert value.dtype is not None
    if value.dtype is ir.DataType.STRING:
        return np.asarray(random.choice(["memopt", "onnx", ""], size=shape), dtype=object)
    try:
        dtype = value.dtype.numpy()
    except TypeError as error:
        raise UnknownInput(f"input {value.name} has type {value.dtype.name}") from error
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        return random.integers(0, limit, shape).astype(dtype)
    if dtype.kind == "c":
        return (random.standard_normal(shape) + 1j * random.standard_normal(shape)).astype(dtype)
    if dtype.kind != "f" and value.dtype is not ir.DataType.BFLOAT16:
        raise UnknownInput(f"input {value.name} has type {value.dtype.name}")
    return np.asarray(random.standard_normal(shape)).astype(dtype)


# Operators whose result holds the very integers that they were given.
_PASSING = {"Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Transpose", "Flatten", "Slice", "Expand", "Concat"}


def _limit(value: ir.Value) -> int:
    """One more than the largest integer that is safe to feed: the shortest table that the value indexes, else 2."""
    limit, work, seen = None, [value], {id(value)}
    while work:
        for node, index in work.pop().uses():
            if not is_standard(node):
                continue
            if node.op_type == "Gather" and index == 1:
                data = argument(node, 0)
                shape = dims(data)
                axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
                length = None if shape is None else shape[axis]
                if length:
                    limit = length if limit is None else min(limit, length)
            elif node.op_type in _PASSING and node.outputs and id(node.outputs[0]) not in seen:
                seen.add(id(node.outputs[0]))
                work.append(node.outputs[0])
            elif node.op_type == "Where" and index > 0:
                table = constant(argument(node, 3 - index))
                if table is None or table.dtype.kind in "iu":
                    work.extend(out for out in node.outputs if id(out) not in seen)
                    seen.update(id(out) for out in node.outputs)
    return max(limit or 2, 1)
