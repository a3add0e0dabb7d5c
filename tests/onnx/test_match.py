"""Patterns of operators, numbers and names, in any order of sums and products."""

import numpy as np
import onnx_ir as ir
import pytest

from memopt.onnx.match import find, is_number
from tests.onnx.build import model

WEIGHTS = {
    "half": np.float32(0.5),
    "two": np.float32(2.0),
    "third": np.array([1 / 3], dtype=np.float16),
    "one": np.array(1, dtype=np.int64),
    "many": np.float32([0.5, 0.5]),
    "true": np.array(True),
}
SILU = ("Mul", "x", ("Sigmoid", "x"))


def last(text):
    return list(ir.from_proto(model(text, WEIGHTS)).graph)[-1]


def test_a_name_stands_for_one_value_wherever_it_is():
    found = find(last("(float[2] a) => (float[2] y) { s = Sigmoid(a) y = Mul(a, s) }"), [SILU])
    assert found.values["x"].name == "a" and [node.op_type for node in found.nodes] == ["Mul", "Sigmoid"]
    assert find(last("(float[2] a, float[2] b) => (float[2] y) { s = Sigmoid(a) y = Mul(b, s) }"), [SILU]) is None


def test_sums_and_products_may_be_turned_and_nothing_else():
    assert find(last("(float[2] a) => (float[2] y) { s = Sigmoid(a) y = Mul(s, a) }"), [SILU])
    difference = last("(float[2] a) => (float[2] y) { s = Sigmoid(a) y = Sub(s, a) }")
    assert find(difference, [("Sub", "x", ("Sigmoid", "x"))]) is None
    assert find(difference, [("Sub", ("Sigmoid", "x"), "x")])


def test_what_a_wrong_order_noted_is_forgotten():
    node = last("(float[2] a) => (float[2] y) { t = Tanh(a) s = Sigmoid(t) y = Mul(s, t) }")
    found = find(node, [("Mul", ("Tanh", "x"), ("Sigmoid", ("Tanh", "x")))])
    assert found.values["x"].name == "a" and {item.op_type for item in found.nodes} == {"Mul", "Sigmoid", "Tanh"}
    assert find(last("(float[2] a) => (float[2] y) { s = Sigmoid(a) y = Mul(s, a) }"), [("Mul", "x", "x")]) is None


def test_the_first_of_several_patterns_and_operators():
    node = last("(float[2] a) => (float[2] y) { s = Mul(a, half) y = Tanh(s) }")
    found = find(node, [("Sigmoid", "p"), (("Sigmoid", "Tanh"), "q"), ("Tanh", "r")])
    assert set(found.values) == {"q"}
    assert find(node, [("Tanh", ("Mul", "x", 0.5))]).values["x"].name == "a"
    assert find(node, [("Tanh", ("Mul", "x", 2))]) is None


def test_who_else_reads_a_node_inside():
    alone = find(last("(float[2] a) => (float[2] y) { s = Sigmoid(a) y = Mul(a, s) }"), [SILU])
    assert alone.outside_user() is None and len(alone.names()) == 2
    shared = "(float[2] a) => (float[2] z, float[2] y) { s = Sigmoid(a) z = Neg(s) y = Mul(a, s) }"
    assert find(last(shared), [SILU]).outside_user().op_type == "Sigmoid"
    returned = "(float[2] a) => (float[2] s, float[2] y) { s = Sigmoid(a) y = Mul(a, s) }"
    assert find(last(returned), [SILU]).outside_user().op_type == "Sigmoid"


@pytest.mark.parametrize(
    ("name", "number", "same"),
    [
        ("half", 0.5, True),
        ("half", 0.5000001, True),  # as float32 rounds it
        ("half", 0.501, False),
        ("third", 1 / 3, True),
        ("third", 0.34, False),
        ("one", 1, True),
        ("one", 1.0000001, False),  # integers are what they are
        ("many", 0.5, False),
        ("true", 1, False),
    ],
)
def test_numbers_are_compared_in_the_type_of_the_graph(name, number, same):
    kinds = {"half": "float", "third": "float16", "one": "int64", "many": "float", "true": "bool"}
    node = last(f"({kinds[name]}[2] a) => ({kinds[name]}[2] y) {{ y = Expand(a, {name}) }}")
    assert is_number(node.inputs[1], number) == same
    assert not is_number(node.inputs[0], number)
