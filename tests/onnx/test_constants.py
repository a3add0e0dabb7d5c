"""What a graph computes from constants alone, and what is not evaluated, with the reason."""

import numpy as np
import onnx_ir as ir

from memopt.onnx.constants import evaluated
from tests.onnx.build import model

WEIGHTS = {"w": np.array([1.0, -2.0], np.float32), "n": np.array([3, 2], np.int64)}


def found(text, inputs="float[2,2] x", opset=18):
    refused = []
    given = ir.from_proto(model(f"({inputs}) => (y) {{ {text} }}", WEIGHTS, opset))
    values = evaluated(given, lambda node, reason: refused.append((node.op_type, reason)))
    return {value.name: array.tolist() for value, array in values.items()}, refused


def test_a_chain_of_constants_is_evaluated_up_to_what_a_caller_gives():
    assert found("a = Abs(w) b = Add(a, w) y = Mul(x, b)") == ({"a": [1.0, 2.0], "b": [2.0, 0.0]}, [])


def test_shapes_are_known_without_the_values():
    values, _ = found("s = Shape(x) z = Size(x) y = Add(s, z)", inputs="float[2,5] x")
    assert values == {"s": [2, 5], "z": 10, "y": [12, 15]}
    assert found("y = Shape <start = 1> (x)", inputs="float[N,5] x")[0] == {"y": [5]}
    assert found("y = Shape(x)", inputs="float[N,5] x")[0] == {}, "a size that is a caller's"


def test_what_is_not_evaluated_is_told():
    assert found("y = RandomNormal <shape = [2]> ()") == ({}, [("RandomNormal", "it draws random numbers")])
    quantized = "s = Constant <value = float {0.5}> () y = QuantizeLinear(w, s)"
    values, ((operator, reason),) = found(quantized)
    assert "y" not in values and operator == "QuantizeLinear" and reason.startswith("it is quantization")
    values, ((operator, reason),) = found("a = NonZero(w) y = Mul(a, n)")
    assert values == {} and operator == "NonZero" and "not known beforehand" in reason
