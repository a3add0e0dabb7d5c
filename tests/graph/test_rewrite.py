"""What rewrites share: storages read from the metadata, dead nodes erased and new ones added, constants likewise."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from memopt.graph.rewrite import (
    Builder,
    add_constant,
    ancestors,
    drop_unused_constants,
    erase_unused,
    fake_value,
    forget_inplace,
    returned_storages,
    storages,
)
from memopt.passes.inplace import Inplace
from memopt.program import InputKind, Program
from tests.passes.build import trace
from tests.support import assert_same

aten = torch.ops.aten
X = torch.arange(24.0).reshape(4, 6)


def node(program: Program, name: str) -> torch.fx.Node:
    (found,) = [node for node in program.graph.nodes if node.name == name]
    return found


def test_storages_are_shared_by_views_and_apart_for_items() -> None:
    program = trace(lambda x: (torch.sort(x.sin()[1:])[0].t(), x.view(24)), X)
    sin, part, view, x = (storages(node(program, name)) for name in ("sin", "slice_1", "view", "x_1"))
    assert sin == part and list(sin.values()) == [96]
    assert view == x and x.keys().isdisjoint(sin)
    sort = storages(node(program, "sort"))
    assert list(sort.values()) == [72, 144]
    assert storages(node(program, "t")).items() <= sort.items()
    assert storages(program.graph.output_node()) == {}


def test_sparse_values_are_counted_by_their_elements() -> None:
    program = trace(lambda x: (x.sin(),), X)
    sin = node(program, "sin")
    sin.meta["val"] = torch.eye(3).to_sparse()
    assert list(storages(sin).values()) == [3 * 3 * 4]


def test_returned_storages_are_those_of_outputs() -> None:
    program = trace(lambda x: (x.sin()[0], x.cos().exp()), X)
    found = returned_storages(program)
    assert found == {*storages(node(program, "sin")), *storages(node(program, "exp"))}


def test_the_unused_go_with_what_only_they_used() -> None:
    def function(x):
        y = x.sin()
        return (y.cos(), torch.bernoulli(x), y.exp().tanh())

    program = trace(function, X.clamp(0, 1), keep=1)
    graph = program.copy().graph
    nodes = {node.name: node for node in graph.nodes}
    assert erase_unused(graph, [nodes["tanh"], nodes["bernoulli"], nodes["x_1"], nodes["cos"]]) == ["tanh", "exp"]
    left = [node.name for node in graph.nodes]
    assert "sin" in left and "bernoulli" in left and "exp" not in left
    graph.lint()


def test_a_node_named_twice_is_erased_once() -> None:
    graph = trace(lambda x: (x.sin(), x.cos()), X, keep=1).copy().graph
    dead = [node for node in graph.nodes if node.name == "cos"]
    assert erase_unused(graph, dead * 2) == ["cos"]


def test_a_new_constant_follows_the_inputs_and_has_a_name_of_its_own() -> None:
    program = trace(lambda x: (x.sin(),), X)
    value = torch.ones(6, requires_grad=True)
    for expected in ("sin_1", "sin_2"):
        edited = program.copy()
        placeholder, edited = add_constant(edited, "sin", value)
        assert placeholder.name == placeholder.target == expected
        (sin,) = [n for n in edited.calls if n.target is aten.sin.default]
        with edited.graph.inserting_after(sin):
            total = edited.graph.call_function(aten.add.Tensor, (sin, placeholder))
        sin.replace_all_uses_with(total)
        total.args = (sin, placeholder)
        program = edited.finish()
        program.check()
        assert program.inputs[-1].kind is InputKind.CONSTANT
        assert isinstance(placeholder.meta["val"], FakeTensor) and placeholder.meta["val"].shape == (6,)
        assert program.state[expected].data_ptr() == value.data_ptr() and not program.state[expected].requires_grad
    assert_same(program.run(X), [X.sin() + 1 + 1])


def test_of_a_program_that_is_planned_for_another_device_a_constant_is_there_too() -> None:
    program = trace(lambda x, weight: (x @ weight,), torch.ones(2, 6), torch.ones(6, 3))
    weight = program.placeholders[1]
    with weight.meta["val"].fake_mode:
        weight.meta["val"] = torch.empty(6, 3, device="meta")
    placed = dataclasses.replace(program.copy(), state={weight.name: torch.ones(6, 3)})
    placeholder, placed = add_constant(placed, "table", torch.ones(3, 2).t())
    found = placeholder.meta["val"]
    assert found.device.type == "meta" and found.stride() == (1, 2)
    assert placed.state[placeholder.name].device.type == "cpu"


def test_a_constant_in_a_program_without_inputs() -> None:
    program = trace(lambda: (torch.zeros(6) + 1,))
    edited = program.copy()
    placeholder, edited = add_constant(edited, "table", torch.ones(6))
    assert next(iter(edited.graph.nodes)) is placeholder
    edited.finish().check()


def test_constants_that_nobody_reads_are_dropped_and_nothing_else() -> None:
    kinds = {1: InputKind.CONSTANT, 2: InputKind.CONSTANT, 3: InputKind.PARAMETER}
    program = trace(lambda x, a, b, c: (x + a,), X, X * 2, X * 3, X * 4, kinds=kinds)
    edited, names = drop_unused_constants(program.copy())
    edited = edited.finish()
    edited.check()
    assert names == [program.inputs[2].name]
    assert [entry.kind for entry in edited.inputs] == [InputKind.USER, InputKind.CONSTANT, InputKind.PARAMETER]
    assert set(edited.state) == set(program.state) - set(names)
    assert_same(edited.run(X, X), program.run(X, X))
    same, names = drop_unused_constants(edited.copy())
    assert names == [] and same.inputs == edited.inputs


def test_annotations_are_forgotten() -> None:
    program = Inplace().run(trace(lambda x: (x.sin().exp(),), X)).program
    edited = program.copy()
    assert any("inplace" in node.meta for node in edited.graph.nodes)
    forget_inplace(edited.graph)
    assert not any("inplace" in node.meta for node in edited.graph.nodes)
    assert any("inplace" in node.meta for node in program.graph.nodes)


def test_fake_values_are_those_of_a_run() -> None:
    program = trace(lambda x: (x.sin(), x.t()), X)
    sin, t = node(program, "sin"), node(program, "t")
    value = fake_value(program, aten.mm.default, (sin, t))
    assert isinstance(value, FakeTensor) and value.shape == (4, 4)
    assert fake_value(program, aten.cat.default, ([sin, sin],), {"dim": 1}).shape == (4, 12)
    with pytest.raises(RuntimeError):
        fake_value(program, aten.mm.default, (sin, sin))


def test_what_a_node_is_computed_from() -> None:
    program = trace(lambda x, w: (x.exp() + x, w.sin()), X, X.clone())
    found = ancestors([program.calls[1]])
    assert {node.name for node in found} == {"exp", "add", program.placeholders[0].name}
    assert ancestors([]) == set()


def test_nodes_are_added_before_one_with_the_line_of_another() -> None:
    program = trace(lambda x: (x.sin().cos(),), X)
    sin, cos = node(program, "sin"), node(program, "cos")
    sin.meta.update(stack_trace="line 1", phase="forward", val=None)
    made = Builder(cos, sin).call(aten.mul.Tensor, sin, 2)
    assert made.next is cos and made.meta == {"stack_trace": "line 1", "phase": "forward"}
    assert Builder(sin).call(aten.neg.default, made.args[0]).next is sin
