"""Aligned graphs as a unified diff: what is shown around a change, where it stands, and what nodes are called."""

import pytest

from memopt.difference.graph_diff import GraphNode, align
from memopt.difference.unified import unified


def chain(*operators, prefix="n"):
    """Nodes that each read the one before."""
    names = [f"{prefix}{index}" for index in range(len(operators))]
    return [
        GraphNode(name, operator, (names[index - 1],) if index else (), "(%0)" if index else "()")
        for index, (name, operator) in enumerate(zip(names, operators, strict=True))
    ]


def diff(before, after, context=3):
    return unified(align(before, after), "old", "new", context)


def test_equal_graphs_differ_in_nothing_whatever_their_names():
    assert diff(chain("input", "exp", "sin"), chain("input", "exp", "sin", prefix="m")) == ""
    assert diff([], []) == ""


def test_a_node_that_is_gone_is_shown_with_what_stands_around_it():
    operators = ["input", *"abcdefgh"]
    text = diff(chain(*operators), chain(*(name for name in operators if name != "d")), context=1)
    assert text.splitlines() == [
        "--- old", "+++ new", "@@ -4,4 +4,3 @@", " n3 = c(n2)", "-n4 = d(n3)", "-n5 = e(n4)", "+n5 = e(n3)",
        " n6 = f(n5)",
    ]  # fmt: skip
    assert text.endswith("\n")


def test_changes_that_are_near_share_a_group_and_those_far_apart_do_not():
    operators = ["input", *"abcdefghijkl"]
    without = [name for name in operators if name not in "ak"]
    assert diff(chain(*operators), chain(*without), context=1).count("@@ -") == 2
    assert diff(chain(*operators), chain(*without), context=5).count("@@ -") == 1


@pytest.mark.parametrize("empty", ["before", "after"])
def test_a_graph_beside_none(empty):
    nodes = chain("input", "exp")
    text = diff([], nodes) if empty == "before" else diff(nodes, [])
    assert text.splitlines()[2] == ("@@ -0,0 +1,2 @@" if empty == "before" else "@@ -1,2 +0,0 @@")
    assert {line[0] for line in text.splitlines()[3:]} == {"+" if empty == "before" else "-"}


def test_partners_share_the_first_graphs_names_and_a_new_node_takes_none_of_them():
    before = chain("input", "exp", "sin")
    after = [GraphNode("x", "input", (), "()"), GraphNode("n2", "tanh", ("x",), "(%0)")]
    after += [GraphNode("z", "exp", ("n2",), "(%0)"), GraphNode("w", "sin", ("z",), "(%0)")]
    lines = diff(before, after).splitlines()
    assert "+n2' = tanh(n0)" in lines and " n0 = input()" in lines
    assert not any("x" in line.replace("exp", "") for line in lines[3:])
