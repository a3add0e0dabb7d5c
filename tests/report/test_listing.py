"""Graphs of passes as text."""

from types import SimpleNamespace

from memopt.difference.graph_diff import GraphNode
from memopt.report.listing import change, listing, record_texts

X = GraphNode("x", "input")
RELU, GELU = (GraphNode("y", f"aten.{name}", ("x",), "(%0)") for name in ("relu", "gelu"))


def record(name, before, after, program=0):
    graphs = [
        None if nodes is None else SimpleNamespace(nodes=[SimpleNamespace(as_graph_node=lambda n=n: n) for n in nodes])
        for nodes in (before, after)
    ]
    if before is after:
        graphs[1] = graphs[0]
    return SimpleNamespace(name=name, before=graphs[0], after=graphs[1], program=program)


def test_a_graph_is_a_heading_and_a_line_for_each_node():
    assert listing([X, RELU], "after fuse") == f"# after fuse\n{X.line()}\n{RELU.line()}\n"


def test_a_change_is_a_unified_diff_and_none_says_so():
    text = change([X, RELU], [X, GELU], "fuse", ", graph 1")
    assert text.startswith("--- before fuse, graph 1\n+++ after fuse, graph 1\n")
    assert f"-{RELU.line()}" in text and "+y' = aten.gelu(x)" in text
    assert change([X, RELU], [X, RELU], "fuse") == "# fuse changed nothing\n"


def test_what_was_asked_for_is_told_in_order():
    changed, same, unknown = (
        record("a", [X, RELU], [X, GELU]),
        record("b", nodes := [X, GELU], nodes),
        record("c", None, None),
    )
    records = [changed, same, unknown]
    assert record_texts(records, (), changed=False) == []
    assert [text.splitlines()[0] for text in record_texts(records, ("b", "c"), changed=True)] == [
        "--- before a",
        "# after b",
    ]


def test_of_several_graphs_each_is_named():
    records = [record("a", [X, RELU], [X, GELU]), record("a", [X, RELU], [X, GELU], program=1)]
    assert [text.splitlines()[0] for text in record_texts(records, ("a",), changed=False)] == [
        "# after a, graph 0",
        "# after a, graph 1",
    ]
