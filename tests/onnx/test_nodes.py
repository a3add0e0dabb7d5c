"""An ONNX graph as plain nodes, in order and with what they read."""

import numpy as np

from memopt.onnx.load import prepare
from memopt.onnx.nodes import graph_nodes
from tests.onnx.build import model

WEIGHTS = {"w": np.array([1.0, 2.0], np.float32)}
SUM = "(float[N,2] x) => (float[N,2] y) { y = Add(x, w) }"


def nodes(text, weights=WEIGHTS, **options):
    return graph_nodes(prepare(model(text, weights)), **options)


def test_inputs_and_weights_come_first_and_the_output_last():
    split = "a = Add(x, w) y, i = Split <axis = 1, num_outputs = 2> (a)"
    x, w, add, top, out = nodes(f"(float[N,2] x) => (float[N,1] y, float[N,1] i) {{ {split} }}")
    assert (x.operator, x.result) == ("input", "float[N, 2]")
    assert (w.operator, w.bytes, w.result) == ("initializer", 8, "float[2]")
    assert (add.inputs, add.text) == ((x.name, w.name), "(%0, %1)")
    assert (top.operator, top.text) == ("Split", "(%0, axis=1, num_outputs=2)")
    assert (out.inputs, out.text) == ((top.name, top.name), "(y: %0, i: %1:1)")


def test_a_digest_tells_weights_apart_where_it_is_asked_for():
    def value(weights=WEIGHTS, **options):
        (found,) = (node for node in nodes(SUM, weights, **options) if node.operator == "initializer")
        return found.value

    assert value() == ""
    assert value(values=True) == value(values=True) != value({"w": WEIGHTS["w"] + 1}, values=True)


def test_graphs_within_nodes_stand_before_their_holder():
    branches = "then_branch = a () => (float[2] p) { p = Neg(x) }, else_branch = b () => (float[2] q) { q = Abs(x) }"
    found = nodes(f"(bool c, float[2] x) => (float[2] y) {{ y = If (c) <{branches}> }}")
    operators = [node.operator for node in found]
    assert operators == ["input", "input", "Neg", "Abs", "If", "output"]
    inner, holder = found[2], found[4]
    assert inner.module == f"{holder.name}/then_branch" and inner.name in holder.inputs
    assert holder.text == "(%0, then_branch=[%1], else_branch=[%2])"
