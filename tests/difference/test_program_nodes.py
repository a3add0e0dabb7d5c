from __future__ import annotations

import torch
from torch import nn

from memopt.difference.program_nodes import graph_nodes, module_path
from tests.support import capture


def program():
    return capture(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.ones(4, 3))


def test_nodes_come_in_order_with_what_they_read_and_make() -> None:
    nodes = graph_nodes(program())
    assert [node.operator for node in nodes[:3]] == ["parameter", "parameter", "input"]
    relu = next(node for node in nodes if node.operator == "aten.relu")
    assert relu.result == "float32[4, 2]" and relu.bytes == 4 * 2 * 4 and len(relu.inputs) == 1
    assert nodes[-1].operator == "output" and nodes[-1].inputs == (relu.name,)


def test_values_are_told_apart_by_digests_only_where_they_are_asked_for() -> None:
    one, other = program(), program()
    assert not any(node.value for node in graph_nodes(one))
    first, second = ([node.value for node in graph_nodes(item, values=True)] for item in (one, other))
    assert first[0] and first[0] != second[0] and first == [n.value for n in graph_nodes(one, values=True)]


def test_nodes_name_their_module() -> None:
    item = program()
    (relu,) = [node for node in item.calls if "relu" in str(node.target)]
    assert module_path(relu) == "1"


def test_what_was_said_of_a_call_is_said_again_of_a_copy_and_of_another_call_anew() -> None:
    item = program()
    before = {node.name: node for node in graph_nodes(item)}
    copy = item.copy()
    relu = copy.calls[-1]
    assert all(node is before[node.name] for node in graph_nodes(copy) if node.name == relu.name)
    relu.meta["inplace"] = 0
    assert "in place of argument 0" in next(node.text for node in graph_nodes(copy) if node.name == relu.name)
    del relu.meta["inplace"]
    relu.replace_input_with(copy.calls[0], copy.calls[0])
    with copy.graph.inserting_before(relu):
        twin = copy.graph.call_function(torch.ops.aten.neg.default, (relu.args[0],))
    relu.args = (twin,)
    renamed = next(node for node in graph_nodes(copy.finish()) if node.name == relu.name)
    assert renamed.inputs == (twin.name,)
