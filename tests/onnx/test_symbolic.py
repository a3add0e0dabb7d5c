from typing import Any

import numpy as np
import pytest

from memopt.onnx import prepare
from memopt.onnx.symbolic import Symbols
from tests.onnx.build import model, weight

CONSTANTS = {
    "n0": np.array([0]),
    "n1": np.array([1]),
    "n3": np.array([3]),
    "minus": np.array([-1]),
    "last": np.array([2**63 - 1]),
    "zero": np.array(0),
    "one": np.array(1),
    "none": np.float32(0),
    "unit": np.float32(1),
    "twice": np.array([1, 2, 3]),
    "w": weight(6, 5),
    "row": weight(9),
}


def found(nodes: str, inputs: str = "float[B,S,6] x", opset: int = 18) -> tuple[Any, Any]:
    """Shape and data of the value `r` as text."""
    graph = prepare(
        model(f"({inputs}) => (float y) {{ {nodes} k = Shape(r) y = Cast<to=1>(k) }}", CONSTANTS, opset=opset)
    )
    symbols = Symbols(graph)
    (value,) = [value for node in graph.graph for value in node.outputs if value.name == "r"]
    shape, data = symbols.shapes.get(value), symbols.data.get(value)
    return (None if shape is None else [str(dim) for dim in shape]), (None if data is None else [str(d) for d in data])


@pytest.mark.parametrize(
    ("nodes", "shape"),
    [
        ("r = MatMul(x, w)", ["B", "S", "5"]),
        ("r = Transpose<perm=[2,0,1]>(x)", ["6", "B", "S"]),
        ("s = Shape<end=2>(x) t = Concat<axis=0>(s, n3, minus) r = Reshape(x, t)", ["B", "S", "3", "2"]),
        ("t = Concat<axis=0>(minus, n3) r = Reshape(x, t)", ["2*B*S", "3"]),
        ("r = Slice(x, n0, last, n1)", ["B", "S", "6"]),
        ("r = Slice(x, n0, n3, n1)", ["B", "Min(3, S)", "6"]),
        ("s = Shape<start=1, end=2>(x) r = Slice(row, n0, s, n0, n1)", ["Min(9, S)"]),
        ("s = Shape<start=0, end=1>(x) q = Squeeze(s) r = Range(zero, q, one)", ["B"]),
        ("s = Shape<start=0, end=1>(x) q = Squeeze(s) f = Cast<to=1>(q) r = Range(none, f, unit)", ["B"]),
        ("r = Tile(x, twice)", ["B", "2*S", "18"]),
        ("s = Shape<end=2>(x) r = ConstantOfShape(s)", ["B", "S"]),
        ("s = Shape(x) r = Expand(n1, s)", ["B", "S", "6"]),
    ],
)
def test_shapes(nodes: str, shape: list[str]) -> None:
    assert found(nodes)[0] == shape


@pytest.mark.parametrize(
    ("nodes", "data"),
    [
        ("s = Shape(x) r = Gather(s, zero)", ["B"]),
        ("s = Shape(x) g = Gather(s, one) u = Unsqueeze(g, n0) r = Mul(u, n3)", ["3*S"]),
        ("s = Shape(x) r = Slice(s, minus, last)", ["6"]),
        ("s = Shape<end=1>(x) r = Add(s, n1)", ["B + 1"]),
        ("s = Shape<start=2>(x) r = Div(s, n3)", ["2"]),
        ("s = Shape<start=1>(x) r = Concat<axis=0>(minus, s)", ["-1", "S", "6"]),
        ("s = Shape<end=1>(x) f = Cast<to=1>(s) r = Cast<to=7>(f)", None),
    ],
)
def test_data(nodes: str, data: list[str] | None) -> None:
    assert found(nodes)[1] == data


def test_axes_of_different_names_broadcast_to_something_else() -> None:
    shape, _ = found("r = Add(x, z)", "float[B,S,6] x, float[C,S,6] z")
    assert shape[0] not in ("B", "C") and shape[1:] == ["S", "6"]


def test_axes_without_a_name_are_all_different() -> None:
    shape, _ = found("r = Identity(x)", "float[?,?] x")
    assert len(set(shape)) == 2
