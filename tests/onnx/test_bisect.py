"""Bisection of passes on ONNX graphs, and ONNX graphs as nodes."""

from __future__ import annotations

import onnx
import pytest
import torch

import memopt
from memopt.difference.bisect import NothingToFind, bisect
from memopt.difference.graph_diff import align
from memopt.onnx import ONNXRUNTIME, STANDARD, OnnxPass, prepare
from memopt.onnx.bisect import NumbersCheck, pipeline
from memopt.onnx.nodes import graph_nodes
from tests.onnx.build import model, weight


class SwapAdds(OnnxPass):
    """Swaps the operands of every addition; the fourth one becomes a subtraction."""

    name = "swap_adds"
    tolerance = 1.0

    def rewrite(self, edit):
        number = 0
        for graph in edit.graphs():
            for node in [node for node in graph if node.op_type == "Add"]:
                number += 1
                made = edit.node(node, "Sub" if number == 4 else "Add", [node.inputs[1], node.inputs[0]])
                edit.replace(node.outputs[0], made.outputs[0])
                name = node.name
                edit.erase(node)
                edit.change(f"swapped {name}", (name,), (made.name,))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """BERT as torch.onnx writes it, before any pass."""
    path = tmp_path_factory.mktemp("onnx") / "bert.onnx"
    torch.manual_seed(0)
    net = memopt.models.build("bert_base:tiny").eval()
    torch.onnx.export(net, (), path, kwargs=net.example_inputs(2), dynamo=True, verbose=False, optimize=False)
    return prepare(onnx.load(path))


def test_a_planted_pass_is_found_by_name_and_node(bert):
    passes = (*STANDARD[:5], SwapAdds(), *STANDARD[5:])
    found = bisect(bert, pipeline(passes), NumbersCheck(bert))
    assert (found.name, found.number, found.count) == ("swap_adds", 6, len(passes))
    rewrite = found.rewrite
    assert rewrite.number == 4 and rewrite.summaries == (f"swapped {rewrite.before[0]}",)
    assert [line for line in rewrite.text.splitlines() if line.startswith("+") and "= Sub(" in line]
    assert rewrite.after[0].startswith(rewrite.before[0])
    assert "float64 error" in found.words and found.checks < 15


@pytest.mark.parametrize("passes", [STANDARD, ONNXRUNTIME])
def test_every_prefix_of_every_pass_computes_the_same(bert, passes):
    check, found = NumbersCheck(bert), pipeline(passes)
    with pytest.raises(NothingToFind):
        bisect(bert, found, check)
    current, made = bert, 0
    for index in range(len(passes)):
        after = found.apply(index, current)
        if after is not current:
            (split,) = found.splits(index, current, after)
            for number in range(1, split.count + 1, max(1, split.count // 5)):
                part = split.first(number)
                assert part is not None and check(part, "").passed, (found.names[index], number)
                made += 1
        current = after
    assert made >= 20


def test_models_that_cannot_be_compared():
    given = model("(float[4] x) => (float[4] y) { y = RandomNormalLike(x) }")
    with pytest.raises(ValueError, match="the numbers cannot be compared"):
        NumbersCheck(prepare(given))


BRANCHES = """(bool c, float[3] x) => (float[3] y) {
    z = Add(x, w)
    y = If(c) <then_branch = g () => (float[3] t) { t = Relu(z) }, else_branch = h () => (float[3] e) { e = Mul(z, w) }>
}"""


def test_graphs_as_nodes():
    found = prepare(model(BRANCHES, {"w": weight(3)}))
    nodes = graph_nodes(found, values=True)
    by_operator = {node.operator: node for node in nodes}
    assert [node.operator for node in nodes] == ["input", "input", "initializer", "Add", "Relu", "Mul", "If", "output"]
    assert by_operator["initializer"].value and by_operator["initializer"].bytes == 12
    assert by_operator["Relu"].module.endswith("/then_branch")
    assert len(by_operator["If"].inputs) == 3
    lines = [node.line() for node in nodes]
    assert lines[1] == "x: float[3] = input 1" and lines[-1].startswith("output = output(y: ")
    assert align(nodes, graph_nodes(found, values=True)).equal


def test_attributes_and_results_are_told_apart():
    text = "(float[4,4] x) => (float[2,4] y) {{ a, b = Split <axis = {axis}> (x, s) y = Sub({pair}) }}"
    s = {"s": [2, 2]}
    one = graph_nodes(prepare(model(text.format(axis=0, pair="a, b"), s)))
    swapped = graph_nodes(prepare(model(text.format(axis=0, pair="b, a"), s)))
    assert [row.why for row in align(one, swapped).rows if row.kind != "same"] == ["arguments"]
    other = graph_nodes(prepare(model(text.format(axis=1, pair="a, b").replace("[2,4] y", "[4,2] y"), s)))
    assert "arguments" in next(row.why for row in align(one, other).rows if row.kind == "changed")


def test_the_passes_leave_nodes_that_can_be_aligned(bert):
    current = bert
    for index, item in enumerate(STANDARD):
        after = pipeline(STANDARD).apply(index, current)
        alignment = align(graph_nodes(current), graph_nodes(after), names=True)
        if after is not current:
            assert not alignment.equal, item.name
        current = after
