"""Aliasing: which values share a block of memory, who made it, and how large it is."""

from __future__ import annotations

import operator

import torch
from torch import fx

from memopt.memory.aliasing import Aliasing, analyse, owner
from memopt.passes.inplace import Inplace
from memopt.program import InputKind, Program
from tests.passes.build import capture_joint, trace

X = torch.arange(24.0).reshape(4, 6)


def by_name(program: Program) -> dict[str, list[tuple[str, int]]]:
    """Per node, (producer, bytes) of each storage of its value."""
    found = analyse(program)
    return {
        node.name: [(found.storages[index].producer.name, found.storages[index].nbytes) for index in indices]
        for node, indices in found.of.items()
    }


def test_a_view_has_the_whole_storage_of_its_base() -> None:
    program = trace(lambda x: ((x + 1)[1].view(2, 3).t() * 2,), X)
    found = by_name(program)
    assert found["add"] == found["select"] == found["view"] == found["t"] == [("add", 96)]
    assert found["mul"] == [("mul", 24)]
    assert found["x_1"] == [("x_1", 96)]


def test_a_view_of_an_input_belongs_to_the_input() -> None:
    program = trace(lambda x: (x[:, :2] + 1,), X)
    assert by_name(program)["slice_1"] == [("x_1", 96)]
    assert analyse(program).created_by(program.calls[0]) == []


def test_an_input_that_is_a_part_counts_whole() -> None:
    assert by_name(trace(lambda x: (x + 1,), X[1:, ::2])) == {"x_1": [("x_1", 96)], "add": [("add", 36)]}


def test_a_multiple_result_has_a_storage_per_item() -> None:
    program = trace(lambda x: (torch.sort(x)[0] + 1,), X)
    found = by_name(program)
    assert found["sort"] == [("sort", 96), ("sort", 192)]
    assert found["getitem"] == [("sort", 96)]
    sort = program.calls[0]
    assert analyse(program).created_by(sort) == [1, 2]


def test_items_of_one_storage_are_one_storage() -> None:
    program = trace(lambda x: (torch.split(x + 1, 2)[1].sin(),), X)
    (split,) = [node for node in program.calls if "split" in str(node.target)]
    assert by_name(program)[split.name] == [("add", 96), ("add", 96)]
    assert analyse(program).created_by(split) == []


def test_an_expanded_value_counts_what_lies_in_memory() -> None:
    assert by_name(trace(lambda x: (x.expand(5, 4, 6) + 1, x.sum().expand(100) * 1), X))["expand_1"] == [("sum_1", 4)]


def test_two_inputs_of_one_storage_are_one() -> None:
    base = torch.arange(6.0)
    program = trace(lambda x, y: (x + y,), base, base[:3].repeat(2))
    assert len(analyse(program).storages) == 3
    # In a graph of Dynamo two fake inputs may share a storage: views that the caller made of one tensor.
    first, second = program.placeholders
    second.meta["val"] = first.meta["val"].view(6)
    assert by_name(program)[second.name] == [(first.name, 24)]


def test_an_annotated_result_takes_the_storage_of_its_operand() -> None:
    program = Inplace().run(trace(lambda x: (((x + 1).relu() * 2).t().sigmoid(),), X)).program
    found = by_name(program)
    assert found["relu"] == found["mul"] == found["sigmoid"] == [("add", 96)]
    assert len(analyse(program).storages) == 2


def test_what_is_no_tensor_has_no_storage() -> None:
    program = trace(lambda x: (x + 1,), X)
    found = analyse(program)
    assert program.graph.output_node() not in found.of
    assert found.created_by(program.graph.output_node()) == []


def test_numbers_run_on_and_each_storage_has_one_producer() -> None:
    program = capture_joint(
        lambda x, w: (torch.nn.functional.dropout(x @ w, 0.3).tanh().sum(),), X, torch.ones(6, 3, requires_grad=True)
    )
    found: Aliasing = analyse(program)
    assert [storage.index for storage in found.storages] == list(range(len(found.storages)))
    created = [index for node in program.graph.nodes for index in found.created_by(node)]
    assert created == list(range(len(found.storages)))


def test_constants_are_storages_of_their_own() -> None:
    program = trace(lambda x, c: (x + c,), X, torch.ones(6), kinds={1: InputKind.CONSTANT})
    assert by_name(program)["c_1"] == [("c_1", 24)]


def test_the_owner_of_an_item_is_the_operation() -> None:
    program = trace(lambda x: (torch.sort(x)[0] + 1,), X)
    sort, item, _, add = program.calls
    assert item.target is operator.getitem
    assert owner(item) is sort and owner(sort) is sort and owner(add) is add


def test_the_owner_of_an_item_of_an_item_is_the_operation() -> None:
    graph = fx.Graph()
    call = graph.call_function(torch.ops.aten.sort.default, (graph.placeholder("x"),))
    item = graph.call_function(operator.getitem, (graph.call_function(operator.getitem, (call, 0)), 1))
    assert owner(item) is call
