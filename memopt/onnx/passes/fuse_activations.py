"""Activations written out become one operator; chains of clamps become one clamp."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from memopt.onnx.edit import Edit
from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.match import Match, Pattern, find
from memopt.onnx.read import argument, constant, is_standard, label, only_user, opset, producer

_HALF, _ROOT = 0.5, math.sqrt(2.0)
_ERF: tuple[Pattern, ...] = (("Erf", ("Div", "x", _ROOT)), ("Erf", ("Mul", "x", 1.0 / _ROOT)))
_ONE_PLUS_ERF = tuple(("Add", erf, 1.0) for erf in _ERF)
_CUBES: tuple[Pattern, ...] = (("Pow", "x", 3.0), ("Mul", ("Mul", "x", "x"), "x"))
_TANHS = tuple(("Tanh", ("Mul", ("Add", "x", ("Mul", cube, 0.044715)), math.sqrt(2.0 / math.pi))) for cube in _CUBES)


def _halved(factor: Pattern) -> tuple[Pattern, ...]:
    """X · factor / 2 in the orders that exporters write it."""
    return (
        ("Mul", ("Mul", "x", _HALF), factor),
        ("Mul", ("Mul", "x", factor), _HALF),
        ("Mul", "x", ("Mul", factor, _HALF)),
        ("Div", ("Mul", "x", factor), 2.0),
    )


_GELU = tuple(form for factor in _ONE_PLUS_ERF for form in _halved(factor))
_GELU_TANH = tuple(form for tanh in _TANHS for form in _halved(("Add", tanh, 1.0)))
_MISH: tuple[Pattern, ...] = (("Mul", "x", ("Tanh", ("Softplus", "x"))),)
_RELU6 = ("Clip", ("Add", "x", 3.0), 0.0, 6.0)
_HARD_SWISH: tuple[Pattern, ...] = (
    ("Mul", "x", ("Div", _RELU6, 6.0)),
    ("Mul", "x", ("Mul", _RELU6, 1.0 / 6.0)),
    ("Div", ("Mul", "x", _RELU6), 6.0),
    ("Mul", ("Mul", "x", _RELU6), 1.0 / 6.0),
)
_GATED: tuple[Pattern, ...] = (("Mul", "x", ("HardSigmoid", "x")),)


class FuseActivations(OnnxPass):
    """Replace activations that are written out by the standard operator, and chains of clamps by one.

    Cases, each from the operator set that has the operator on:
        1. x / 2 · (1 + erf(x / √2)), in any order of its factors: Gelu (20).
        2. x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))): Gelu with approximate = tanh (20).
        3. x · tanh(softplus(x)): Mish (18).
        4. x · clip(x + 3, 0, 6) / 6, and x · HardSigmoid(x) with alpha 1/6 and beta 1/2: HardSwish (14).
        5. Relu of Relu; Clip of Clip, of constant bounds [a, b] and [c, d] that overlap: [max(a, c), min(b, d)] (11).

    Numbers count as equal when they round to the same value of the graph's type.

    Refusals:
        - A result in the middle has other users, or is an output.
        - Clamps whose ranges do not overlap; clamps with computed bounds.

    Relu and Clip are not merged: engines differ in what Relu makes of NaN.
    """

    name: ClassVar[str] = "fuse_activations"
    tolerance: ClassVar[float] = 4.0

    def rewrite(self, edit: Edit) -> None:
        """Walk each graph in order."""
        version = opset(edit.model)
        for graph in edit.graphs():
            for node in list(graph):
                if node.graph is None:
                    continue
                if is_standard(node, "Relu", "Clip") and version >= 11:
                    _clamps(edit, node)
                elif is_standard(node, "Mul", "Div"):
                    _written_out(edit, node, version)


def _written_out(edit: Edit, node: ir.Node, version: int) -> None:
    cases: list[tuple[int, str, tuple[Pattern, ...], dict[str, Any]]] = [
        (20, "Gelu", _GELU, {}),
        (20, "Gelu", _GELU_TANH, {"approximate": "tanh"}),
        (18, "Mish", _MISH, {}),
        (14, "HardSwish", _HARD_SWISH, {}),
        (14, "HardSwish", _GATED, {}),
    ]
    for since, operator, patterns, attributes in cases:
        if version < since:
            continue
        match = find(node, patterns)
        if match is None or (patterns is _GATED and not _is_standard_gate(match)):
            continue
        if _shape_widens(match):
            continue
        other = match.outside_user()
        if other is not None:
            edit.refuse(node, f"is {operator}, but the result of {label(other)} has other users, or is an output")
            return
        names = match.names()
        new = edit.node(node, operator, [match.values["x"]], attributes, stem=f"{label(node)}_{operator.lower()}")
        edit.replace(node.outputs[0], new.outputs[0])
        edit.erase(node)
        edit.change(f"{len(names)} nodes are {operator}", names, (label(new),))
        return


def _is_standard_gate(match: Match) -> bool:
    (gate,) = [node for node in match.nodes if node.op_type == "HardSigmoid"]
    alpha = gate.attributes["alpha"].as_float() if "alpha" in gate.attributes else 0.2
    beta = gate.attributes["beta"].as_float() if "beta" in gate.attributes else 0.5
    return bool(np.float32(alpha) == np.float32(1 / 6)) and beta == 0.5


def _shape_widens(match: Match) -> bool:
    """Whether a constant of one element has more axes than x, which the result would have then."""
    rank = match.values["x"].shape
    for node in match.nodes:
        for value in node.inputs:
            array = constant(value)
            if array is not None and array.ndim > (0 if rank is None else len(rank)):
                return True
    return False


def _clamps(edit: Edit, node: ir.Node) -> None:
    inner = producer(argument(node, 0), node.op_type)
    if inner is None:
        return
    if only_user(inner.outputs[0]) is not node:
        edit.refuse(node, f"clamps what {label(inner)} clamped, which has other users, or is an output")
        return
    names = (label(inner), label(node))
    if node.op_type == "Clip":
        bounds = [[_bound(each, place) for place in (1, 2)] for each in (inner, node)]
        if any(bound is None for pair in bounds for bound in pair):
            edit.refuse(node, f"the bounds of {names[0]} or its own are computed")
            return
        lows, highs = ([float(pair[place]) for pair in bounds] for place in (0, 1))  # type: ignore[arg-type]
        if max(lows) > min(highs):
            edit.refuse(node, f"its range and that of {names[0]} do not overlap")
            return
        for place, wanted in ((1, lows), (2, highs)):
            chosen = (max if place == 1 else min)(wanted)
            source = inner if wanted.index(chosen) == 0 else node
            _set_input(node, place, argument(source, place))
    source_value = inner.inputs[0]
    node.replace_input_with(0, source_value)
    edit.erase(inner)
    edit.change(f"{names[0]} and {names[1]} are one {node.op_type}", names, (names[1],))


def _set_input(node: ir.Node, place: int, value: ir.Value | None) -> None:
    if place >= len(node.inputs):
        if value is None:
            return
        node.resize_inputs(place + 1)
    node.replace_input_with(place, value)


def _bound(node: ir.Node, place: int) -> float | None:
    """The bound of a Clip; infinite where it is left out, None where it is computed."""
    value = argument(node, place)
    if value is None:
        return -math.inf if place == 1 else math.inf
    array = constant(value)
    return None if array is None or array.size != 1 else float(array.reshape(()))
