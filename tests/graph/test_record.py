from __future__ import annotations

from memopt.difference.graph_diff import GraphNode
from memopt.graph.record import GraphRecord, NodeRecord, StorageRecord, identities


def record() -> GraphRecord:
    nodes = (
        NodeRecord("x", "x", "input"),
        NodeRecord("a", "a", "aten.relu", ("x",), flops=3, moved=8),
        NodeRecord("b", "b", "aten.neg", ("a",), flops=4, moved=16),
        NodeRecord("output", "output", "output", ("b",)),
    )
    return GraphRecord(nodes, (StorageRecord("a", 100, 0, 2), StorageRecord("b", 40, 1, 2)))


def test_bytes_alive_are_counted_by_step() -> None:
    graph = record()
    assert [node.name for node in graph.steps] == ["a", "b"]
    assert graph.live_bytes == (100, 140) and graph.peak_bytes == 140
    assert (graph.flops, graph.moved) == (7, 24)


def test_memory_that_is_not_known_has_no_peak() -> None:
    assert GraphRecord(record().nodes, unknown="sizes vary").peak_bytes is None
    assert GraphRecord(()).peak_bytes == 0


def test_a_name_that_another_node_takes_over_is_another_id() -> None:
    before = record()
    same = GraphNode("a", "aten.relu", ("x",), "", "")
    other = GraphNode("a", "aten.exp", ("x",), "", "")
    assert identities([same], [], [])["a"] == "a"
    assert identities([same], [before], [])["a"] == "a"
    assert identities([other], [before], [])["a"] != "a"
    assert identities([other], [before], [(["a"], ["a"])])["a"] == "a"  # the pass says that it is the same
