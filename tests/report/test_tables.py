"""Graphs written as tables, and read back as they were."""

import dataclasses

import pytest

from memopt.graph.record import GraphRecord, NodeRecord, StorageRecord
from memopt.report.tables import TableReader, TableWriter, count

NODE = NodeRecord(
    "k", "add", "aten.add", ("x", "x"), "add(x, x)", "f32[2]", "layer", "a.py:1", "forward", 2, 24, ("j",)
)
GRAPH = GraphRecord((NODE, dataclasses.replace(NODE, id="k2")), (StorageRecord("k", 8, 0, 2),), 1, "")


def written(*graphs):
    writer = TableWriter()
    return [writer.add(graph) for graph in graphs], writer.tables()


def test_what_is_written_is_read():
    places, tables = written(GRAPH, dataclasses.replace(GRAPH, unknown="sizes"))
    assert places == [0, 1]
    assert TableReader(tables).graphs == [GRAPH, dataclasses.replace(GRAPH, unknown="sizes")]


def test_what_is_equal_is_written_once():
    places, tables = written(GRAPH, GRAPH, dataclasses.replace(GRAPH, nodes=(NODE,)))
    assert places == [0, 0, 1]
    assert len(tables["graphs"]) == len(tables["nodes"]) == 2
    assert len(tables["strings"]) == len(set(tables["strings"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tables: tables.pop("strings"), 'no table "strings"'),
        (lambda tables: tables.update(nodes=None), 'no table "nodes"'),
        (lambda tables: tables["nodes"][1].pop(), "row 1 of nodes is broken"),
        (lambda tables: tables["graphs"][0].update(nodes=[99]), "row 0 of graphs is broken"),
        (lambda tables: tables["graphs"][0].update(forward_steps=-1), "row 0 of graphs is broken"),
        (lambda tables: tables["graphs"][0].update(unknown=None), "row 0 of graphs is broken"),
    ],
)
def test_a_broken_table_is_named(change, message):
    _, tables = written(GRAPH)
    change(tables)
    with pytest.raises(ValueError, match=message):
        TableReader(tables)


@pytest.mark.parametrize("value", [True, -1, 1.0, None, "1"])
def test_a_count_is_a_whole_number_from_zero_on(value):
    assert count(3) == 3
    with pytest.raises(TypeError, match="is no count"):
        count(value)
