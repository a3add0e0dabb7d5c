"""Alignment of two graphs: what is one node in both, and what was removed, added, changed or moved."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memopt
from memopt.difference.graph_diff import Alignment, GraphNode, align
from memopt.difference.program_nodes import graph_nodes
from memopt.difference.unified import unified
from tests.support import capture


def node(name: str, operator: str, *inputs: str, text: str = "", **more: str) -> GraphNode:
    reads = ", ".join(f"%{index}" for index in range(len(inputs)))
    return GraphNode(name, operator, inputs, f"({reads}){text}", **more)


def chain(*operators: str, stem: str = "n") -> list[GraphNode]:
    nodes = [node("x", "input")]
    for index, operator in enumerate(operators):
        nodes.append(node(f"{stem}{index}", operator, nodes[-1].name))
    return nodes


def kinds(alignment: Alignment) -> list[tuple[str, str | None, str | None]]:
    """Rows that are not the same, with names."""
    return [
        (
            row.kind,
            None if row.before is None else alignment.before[row.before].name,
            None if row.after is None else alignment.after[row.after].name,
        )
        for row in alignment.rows
        if row.kind != "same"
    ]


def test_names_do_not_matter():
    alignment = align(chain("conv", "relu", "conv", "relu"), chain("conv", "relu", "conv", "relu", stem="other"))
    assert alignment.equal
    assert unified(alignment, "a", "b") == ""


def test_a_node_removed_in_the_middle_of_equal_blocks():
    before, after = chain(*["conv", "bn", "relu"] * 8), chain(*["conv", "relu"] * 8, stem="m")
    alignment = align(before, after)
    assert alignment.counts() == {"removed": 8, "added": 0, "changed": 8, "moved": 0}
    assert {alignment.before[row.before].operator for row in alignment.rows if row.kind == "removed"} == {"bn"}
    assert {row.why for row in alignment.rows if row.kind == "changed"} == {"inputs"}
    assert alignment.by_operator() == [("bn", 8, 0)]


def test_an_inserted_node_shifts_nothing():
    before = chain("add", "add", "add", "mul")
    after = [*before[:2], node("new", "relu", "n0"), node("n1", "add", "new"), *before[3:]]
    assert kinds(align(before, after)) == [("added", None, "new"), ("changed", "n1", "n1")]


def test_what_differs_is_said():
    before = [node("p", "parameter", text=" w", value="aa"), node("y", "mul", "p", text=" 2", result="float32[2]")]
    after = [node("p", "parameter", text=" w", value="bb"), node("y", "mul", "p", text=" 3", result="float16[2]")]
    assert [row.why for row in align(before, after).rows] == ["value", "arguments, result"]
    assert "-p = parameter() w  # value aa\n" in unified(align(before, after), "a", "b")


def test_moved_nodes_keep_their_partners():
    x, a, b = node("x", "input"), node("a", "relu", "x"), node("b", "tanh", "x")
    c = node("c", "add", "a", "b")
    alignment = align([x, a, b, c], [x, b, a, c])
    assert [row[0] for row in kinds(alignment)] == ["moved"]
    assert unified(alignment, "a", "b", context=0).splitlines()[2:] in (
        ["@@ -2,1 +1,0 @@", "-a = relu(x)", "@@ -3,0 +3,1 @@", "+a = relu(x)"],
        ["@@ -1,0 +2,1 @@", "+b = tanh(x)", "@@ -3,1 +3,0 @@", "-b = tanh(x)"],
    )


def test_names_decide_only_where_they_are_known_to_survive():
    x = node("x", "input")
    before = [x, node("a", "relu", "x"), node("b", "relu", "a"), node("c", "sink", "a", "b")]
    after = [x, node("b", "relu", "x"), node("c", "sink", "b", "b")]
    assert ("removed", "a", None) in kinds(align(before, after, names=True))
    assert ("removed", "b", None) in kinds(align(before, after))


@pytest.mark.parametrize(
    ("nodes", "what"),
    [
        ([node("x", "input"), node("x", "input")], "same name"),
        ([node("a", "relu", "b"), node("b", "relu")], "a reads b"),
        ([node("a", "relu", "none")], "a reads none"),
    ],
)
def test_what_is_no_graph_is_refused(nodes, what):
    with pytest.raises(ValueError, match=what):
        align(nodes, [])


@st.composite
def graphs(draw: st.DrawFn) -> list[GraphNode]:
    nodes: list[GraphNode] = []
    for index in range(draw(st.integers(1, 14))):
        earlier = [item.name for item in nodes]
        inputs = draw(st.lists(st.sampled_from(earlier), max_size=3)) if earlier else []
        nodes.append(node(f"v{index}", draw(st.sampled_from(["add", "mul", "relu"])), *inputs))
    return nodes


@given(graphs(), graphs(), st.booleans())
def test_any_two_graphs(before, after, names):
    alignment = align(before, after, names=names)
    assert sorted(row.before for row in alignment.rows if row.before is not None) == list(range(len(before)))
    assert sorted(row.after for row in alignment.rows if row.after is not None) == list(range(len(after)))
    for row in alignment.rows:
        assert (row.before is None) == (row.kind == "added") and (row.after is None) == (row.kind == "removed")
        if row.before is not None and row.after is not None:
            assert before[row.before].operator == after[row.after].operator
    # The text is a diff: without the added lines it is the first graph, without the removed ones the second.
    lines = unified(alignment, "a", "b", context=100).splitlines()[3:]
    if alignment.equal:
        assert lines == []
        return
    assert [line[1:] for line in lines if line[0] != "+"] == [item.line() for item in before]
    found = [line[1:].split(" = ")[1].split("(")[0] for line in lines if line[0] != "-"]
    assert found == [item.operator for item in after]


@given(graphs(), st.randoms())
def test_a_graph_under_other_names_is_the_same(nodes, random):
    names = [f"w{index}" for index in range(len(nodes))]
    random.shuffle(names)
    renamed = dict(zip([item.name for item in nodes], names, strict=True))
    other = [
        dataclasses.replace(item, name=renamed[item.name], inputs=tuple(renamed[name] for name in item.inputs))
        for item in nodes
    ]
    assert align(nodes, other).equal


def test_programs_as_nodes():
    torch.manual_seed(0)
    model = memopt.models.build("resnet18:tiny").eval()
    program = capture(model, **model.example_inputs(1))
    nodes = graph_nodes(program, values=True)
    by_name = {item.name: item for item in nodes}
    assert len(nodes) == len(list(program.graph.nodes))
    assert by_name["images"].operator == "input" and by_name["output"].operator == "output"
    weight = next(item for item in nodes if item.operator == "parameter")
    assert weight.value and weight.text == " stem.0.weight"
    relu = next(item for item in nodes if item.operator == "aten.relu")
    assert relu.module == "stem.2" and "activation.py" in relu.source and relu.bytes == 8 * 32 * 32 * 4
    assert by_name["view"].bytes == 0
    assert f"{relu.name}: float32[1, 8, 32, 32] = aten.relu({relu.inputs[0]})" == relu.line()


def test_two_models_that_differ_in_a_weight_and_an_argument():
    class Small(torch.nn.Module):
        def __init__(self, slope: float) -> None:
            super().__init__()
            self.linear, self.slope = torch.nn.Linear(3, 3), slope

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.leaky_relu(self.linear(x), self.slope)

    torch.manual_seed(0)
    one, other = Small(0.1), Small(0.2)
    other.load_state_dict(one.state_dict())
    first = graph_nodes(capture(one, torch.ones(2, 3)), values=True)
    assert align(first, graph_nodes(capture(one, torch.ones(2, 3)), values=True)).equal
    changed = align(first, graph_nodes(capture(other, torch.ones(2, 3)), values=True))
    assert [row.why for row in changed.rows if row.kind != "same"] == ["arguments"]
    with torch.no_grad():
        other.linear.bias[1] += 1
    changed = align(first, graph_nodes(capture(other, torch.ones(2, 3)), values=True))
    assert [row.why for row in changed.rows if row.kind != "same"] == ["value", "arguments"]


@pytest.mark.parametrize("name", ["resnet18:tiny", "gpt2:tiny"])
def test_every_pass_on_record(name):
    model = memopt.models.build(name).eval()
    program = capture(model, **model.example_inputs(1))
    for item in memopt.INFERENCE:
        result = item.run(program).program
        alignment = align(graph_nodes(program), graph_nodes(result), names=True)
        assert alignment.equal == (result is program), item.name
        program = result
