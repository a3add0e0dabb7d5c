"""Layer and root-mean-square normalization written out become one operator."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from memopt.graph.rewrite import Refused
from memopt.onnx.edit import Edit
from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.match import Match, Pattern, find
from memopt.onnx.read import argument, attribute, constant, dims, integers, is_standard, label, opset

_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}


def _squares(x: Pattern) -> tuple[Pattern, ...]:
    return (("Pow", x, 2.0), ("Mul", x, x))


def _normalized(x: Pattern) -> tuple[Pattern, ...]:
    """X over the root of its mean square, in the ways that exporters write it."""
    forms: list[Pattern] = []
    for square in _squares(x):
        root = ("Sqrt", ("Add", ("ReduceMean", square), "epsilon"))
        forms += [("Div", x, root), ("Mul", x, ("Reciprocal", root)), ("Mul", x, ("Div", 1.0, root))]
    return tuple(forms)


_CENTRED = ("Sub", "x", ("ReduceMean", "x"))
_LAYER = tuple(("Mul", form, "scale") for form in _normalized(_CENTRED))
_LAYER_BIASED = tuple(("Add", form, "bias") for form in _LAYER)
RMS = tuple(("Mul", form, "scale") for form in _normalized("x"))


class FuseNormalization(OnnxPass):
    """Replace normalizations that are written out by the standard operator.

    Cases:
        1. (x - mean(x)) / √(mean((x - mean(x))²) + ε) · scale, and + bias: LayerNormalization (operator set 17).
        2. x / √(mean(x²) + ε) · scale: RMSNormalization (23).
        The means run over the last axis, or the last axes, and keep them.

    Refusals:
        - A result in the middle has other users, or is an output.
        - The means run over other axes; scale or bias are computed or of another shape than these axes; ε is computed.
        - The type is none that the operator takes, or changes on the way.
    """

    name: ClassVar[str] = "fuse_normalization"
    tolerance: ClassVar[float] = 4.0

    def rewrite(self, edit: Edit) -> None:
        """Walk each graph from the end, so that a bias is found before what it is added to."""
        version = opset(edit.model)
        cases = [
            (17, "LayerNormalization", _LAYER_BIASED),
            (17, "LayerNormalization", _LAYER),
            (23, "RMSNormalization", RMS),
        ]
        for graph in edit.graphs():
            for node in reversed(list(graph)):
                if node.graph is None or not is_standard(node, "Add", "Mul"):
                    continue
                for since, operator, patterns in cases:
                    match = find(node, patterns) if version >= since else None
                    if match is None:
                        continue
                    try:
                        _fuse(edit, node, operator, match)
                    except Refused as reason:
                        edit.refuse(node, f"is {operator}, but {reason}")
                    break


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a normalization is by: the first axis that its means run over, and ε."""

    axis: int
    epsilon: float


def _fuse(edit: Edit, node: ir.Node, operator: str, match: Match) -> None:
    other = match.outside_user()
    if other is not None:
        raise Refused(f"the result of {label(other)} has other users, or is an output")
    x = match.values["x"]
    shape = dims(x)
    if shape is None:
        raise Refused(f"the rank of {x.name} is not known")
    parts = read_parts(match, len(shape))
    vectors = [match.values[name] for name in ("scale", "bias") if name in match.values]
    for vector in vectors:
        array = constant(vector)
        if array is None:
            raise Refused(f"{vector.name} is computed")
        if list(array.shape) != shape[parts.axis :]:
            raise Refused(f"{vector.name} has shape {list(array.shape)}, not that of the axes {shape[parts.axis :]}")
    types = {value.dtype for item in match.nodes for value in (*item.outputs, *vectors, x)}
    if len(types) != 1 or x.dtype not in _FLOATS:
        raise Refused("the type is none that it takes, or changes on the way")
    names = match.names()
    attributes: dict[str, Any] = {"axis": parts.axis - len(shape), "epsilon": parts.epsilon}
    new = edit.node(node, operator, [x, *vectors], attributes, stem=f"{label(node)}_normalization")
    edit.replace(node.outputs[0], new.outputs[0])
    edit.erase(node)
    edit.change(f"{len(names)} nodes are {operator}", names, (label(new),))


def read_parts(match: Match, rank: int) -> Parts:
    """The first axis that the means run over, and ε. Raises Refused where these are computed, or not the last axes."""
    first: set[int] = set()
    for mean in (item for item in match.nodes if item.op_type == "ReduceMean"):
        try:
            axes = integers(mean, "axes", 1)
        except ValueError as error:
            raise Refused("the axes of a mean are computed") from error
        if not attribute(mean, "keepdims", 1) or not axes:
            raise Refused("a mean drops its axes, or runs over all of them")
        places = sorted(axis % rank for axis in axes)
        if places != list(range(places[0], rank)):
            raise Refused(f"a mean runs over axes {places}, not over the last ones")
        first.add(places[0])
    if len(first) != 1:
        raise Refused("the means run over different axes")
    epsilon = constant(match.values["epsilon"])
    if epsilon is None or epsilon.size != 1 or argument(match.nodes[0], 0) is None:
        raise Refused("epsilon is computed")
    return Parts(first.pop(), float(np.asarray(epsilon, dtype=np.float64).reshape(())))
