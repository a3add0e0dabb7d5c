"""Program: every rule of its specification, broken one at a time, and what copies, edits and runs of it keep."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable

import pytest
import torch
from torch import fx

from memopt.program import (
    Input,
    InputKind,
    Output,
    OutputKind,
    Phase,
    Program,
    ProgramError,
    argument,
    copy_node,
    is_any_view,
    is_effectful,
    is_random,
    is_view,
    source_line,
    tensors_of,
)
from tests.passes.build import arguments, capture_joint, trace
from tests.support import capture

aten = torch.ops.aten
X, W = torch.arange(6.0).reshape(2, 3), torch.ones(3, 4)


def simple() -> Program:
    """mm → relu → sum, with a parameter `w_1` and a constant `c_1`."""
    roles = {1: InputKind.PARAMETER, 2: InputKind.CONSTANT}
    return trace(lambda x, w, c: ((x @ w).relu() + c,), X, W, torch.ones(4), kinds=roles)


def training() -> Program:
    return capture_joint(lambda x, w: (x @ w).relu().sum(), X, W.clone().requires_grad_())


def named(program: Program, name: str) -> fx.Node:
    return next(node for node in program.graph.nodes if node.name == name)


# -- the rules of check() -------------------------------------------------------------------------------------------


def broken(program: Program, edit: Callable[[Program], Program | None]) -> str:
    """What `check` says of an edited copy; the program itself stays right."""
    program.check()
    copy = program.copy()
    with pytest.raises(ProgramError) as error:
        (edit(copy) or copy).check()
    program.check()
    return str(error.value)


def test_operators_must_not_write_to_their_operands() -> None:
    def edit(program: Program) -> None:
        named(program, "relu").target = aten.relu_.default

    assert broken(simple(), edit) == "relu calls aten.relu_.default, which is not functional"


def test_only_aten_operations_are_called() -> None:
    def edit(program: Program) -> None:
        named(program, "relu").target = torch.relu

    assert broken(simple(), edit).startswith("relu calls <built-in method relu")

    def method(program: Program) -> None:
        node = named(program, "relu")
        node.op, node.target = "call_method", "relu"

    assert broken(simple(), method) == "relu is a call_method node: only call_function is allowed"


@pytest.mark.parametrize("name", ["x_1", "mm"])
def test_every_node_has_a_value(name: str) -> None:
    def edit(program: Program) -> None:
        del named(program, name).meta["val"]

    assert broken(simple(), edit) == f"{name} has no meta['val']"


@pytest.mark.parametrize(
    ("change", "recorded"),
    [
        (lambda v: v.new_empty(2, 5), "float32[2, 5], strides [5, 1], cpu"),
        (lambda v: v.new_empty_strided((2, 4), (1, 2)), "float32[2, 4], strides [1, 2], cpu"),
        (lambda v: v.new_empty((2, 4), dtype=torch.half), "float16[2, 4], strides [4, 1], cpu"),
        (lambda v: v.new_empty((2, 4), device="meta"), "float32[2, 4], strides [4, 1], meta"),
    ],
)
def test_recorded_values_are_what_the_operation_gives(change: Callable, recorded: str) -> None:
    def edit(program: Program) -> None:
        node = named(program, "relu")
        node.meta["val"] = change(node.meta["val"])

    wanted = "float32[2, 4], strides [4, 1], cpu"
    assert broken(simple(), edit) == f"relu: recorded as {recorded}, but its operation gives {wanted}"


def test_as_many_values_are_recorded_as_computed_and_of_their_kind() -> None:
    def more(program: Program) -> None:
        named(program, "relu").meta["val"] = (named(program, "mm").meta["val"],) * 2

    def number(program: Program) -> None:
        named(program, "relu").meta["val"] = 3

    assert broken(simple(), more) == "relu: 2 values recorded, 1 computed"
    assert broken(simple(), number).startswith("relu: recorded as 3, but its operation gives FakeTensor")


def test_operands_must_suit_their_operation() -> None:
    def edit(program: Program) -> None:
        named(program, "mm").args = (named(program, "w_1"), named(program, "x_1"))

    assert broken(simple(), edit).startswith("mm: RuntimeError: ")


def test_operands_come_before_their_readers() -> None:
    def edit(program: Program) -> None:
        named(program, "add").append(named(program, "mm"))

    assert "mm" in broken(simple(), edit)


def test_constants_are_inputs_not_attributes() -> None:
    def edit(program: Program) -> None:
        program.graph_module.register_buffer("weight", torch.ones(4))
        with program.graph.inserting_before(named(program, "add")):
            node = program.graph.get_attr("weight")
        named(program, "add").args = (named(program, "relu"), node)

    assert broken(simple(), edit) == "weight reads attribute weight: constants must be inputs of kind CONSTANT"


def test_entries_match_the_graph() -> None:
    def swapped(program: Program) -> Program:
        return dataclasses.replace(program, inputs=program.inputs[::-1])

    def fewer(program: Program) -> Program:
        return dataclasses.replace(program, outputs=())

    assert broken(simple(), swapped).startswith("placeholders ['x_1', 'w_1', 'c_1'] do not match inputs ['c_1', ")
    assert broken(simple(), fewer) == "1 outputs in the graph, 0 entries"


def test_state_baked_and_targets_name_inputs() -> None:
    def no_value(program: Program) -> Program:
        return dataclasses.replace(program, state={"w_1": W})

    def unknown_state(program: Program) -> Program:
        return dataclasses.replace(program, state={**program.state, "gone": W})

    def unknown_baked(program: Program) -> Program:
        return dataclasses.replace(program, baked=frozenset({"gone"}))

    def unknown_target(program: Program) -> Program:
        return dataclasses.replace(program, outputs=(Output(OutputKind.MUTATION, "gone"),))

    assert broken(simple(), no_value) == "constant c_1 has no value in state"
    assert broken(simple(), unknown_state) == "state or baked names gone, which is no input"
    assert broken(simple(), unknown_baked) == "state or baked names gone, which is no input"
    assert broken(simple(), unknown_target) == "a mutation output names gone, which is no input"


def test_each_call_of_a_training_program_has_a_phase() -> None:
    def edit(program: Program) -> None:
        del named(program, "relu").meta["phase"]

    assert broken(training(), edit) == "relu has no phase"


def test_forward_comes_before_backward() -> None:
    def edit(program: Program) -> None:
        named(program, "relu").meta["phase"] = Phase.BACKWARD

    assert broken(training(), edit) == "sum_1 belongs to forward but comes after a backward node"


def test_forward_does_not_read_tangents() -> None:
    def edit(program: Program) -> None:
        for node in program.calls:
            node.meta["phase"] = Phase.FORWARD

    assert broken(training(), edit) == "expand belongs to forward but reads tangents_1, a backward value"


def test_forward_outputs_are_computed_in_forward() -> None:
    def edit(program: Program) -> None:
        for node in program.calls:
            node.meta["phase"] = Phase.BACKWARD

    assert broken(training(), edit) == "forward output sum_1 (user) is computed in backward"


# -- copies and edits -----------------------------------------------------------------------------------------------


def test_a_copied_node_is_what_torch_makes_of_it() -> None:
    graph, other = fx.Graph(), fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y", type_expr=int, default_value=3)
    cat = graph.call_function(torch.ops.aten.cat.default, ([x, y], 1), name="a_name")
    made = graph.call_function(torch.ops.aten.full_like.default, (cat, 2.0), {"dtype": torch.float32})
    cat.meta["val"] = made.meta["val"] = "a value"
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = copy_node(other, node, copies.__getitem__)
    expected = fx.Graph()
    same: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        same[node] = expected.node_copy(node, same.__getitem__)
    for node in graph.nodes:
        one, two = copies[node], same[node]
        assert (one.format_node(), one.type, one.meta) == (two.format_node(), two.type, two.meta)
        assert [user.name for user in one.users] == [user.name for user in two.users]
        assert one.meta is not node.meta
    assert list(other.find_nodes(op="call_function", target=cat.target)) == [copies[cat]]
    other.lint()


def test_a_copy_is_independent_and_keeps_names_metadata_and_tensors() -> None:
    program = simple()
    before = str(program.graph)
    copy = program.copy()
    assert [(n.name, n.meta) for n in copy.graph.nodes] == [(n.name, n.meta) for n in program.graph.nodes]
    assert copy.state["w_1"] is program.state["w_1"] and copy.inputs == program.inputs
    for node in copy.calls:
        node.meta["inplace"] = 0
    named(copy, "relu").replace_all_uses_with(named(copy, "mm"))
    copy.graph.erase_node(named(copy, "relu"))
    copy.finish()
    assert str(program.graph) == before and not any("inplace" in node.meta for node in program.calls)
    assert torch.equal(program.run(-X, W)[0], torch.ones(2, 4)) and (copy.run(-X, W)[0] < 0).any()


def test_finish_fills_in_values_and_phases_and_applies_changes() -> None:
    program = training()
    copy = program.copy()
    relu, first = named(copy, "relu"), next(n for n in copy.calls if n.meta["phase"] is Phase.BACKWARD)
    with copy.graph.inserting_after(relu):
        forward = copy.graph.call_function(aten.to.dtype, (relu, torch.float64))
    with copy.graph.inserting_after(first):
        backward = copy.graph.call_function(aten.neg.default, (first,))
    new = copy.finish(baked=frozenset({"primals_2"}))
    new.check()
    assert (forward.meta["val"].dtype, forward.meta["val"].shape) == (torch.float64, (2, 4))
    assert (forward.meta["phase"], backward.meta["phase"]) == (Phase.FORWARD, Phase.BACKWARD)
    assert backward.meta["val"].shape == first.meta["val"].shape
    assert (new.baked, copy.baked) == ({"primals_2"}, frozenset())


def test_finish_replaces_values_that_no_longer_hold() -> None:
    copy = simple().copy()
    named(copy, "relu").target = aten.t.default
    named(copy, "add").args = (named(copy, "relu"), 1.0)
    new = copy.finish()
    assert new.placeholders[0].meta["val"].shape == (2, 3)
    assert named(new, "add").meta["val"].stride() == (1, 4) and named(new, "add").meta["val"].shape == (4, 2)


# -- running and reading --------------------------------------------------------------------------------------------


def test_run_takes_all_but_constants_and_returns_every_output() -> None:
    program = simple()
    (found,) = program.run(X, W)
    assert torch.equal(found, (X @ W).relu() + 1)
    for wrong in ((X,), (X, W, W)):
        with pytest.raises(TypeError, match=f"takes 2 arguments, {len(wrong)} were given"):
            program.run(*wrong)
    joint = training()
    loss, nothing, gradient = joint.run(*arguments(joint, X, W)[:2], torch.tensor(2.0))
    assert nothing is None
    assert torch.equal(loss, (X @ W).sum()) and torch.equal(gradient, 2 * X.sum(0)[:, None].expand(3, 4))


def test_inputs_are_found_by_name() -> None:
    program = simple()
    assert program.input_of("w_1") == Input("w_1", InputKind.PARAMETER, "m.w_1")
    with pytest.raises(KeyError, match="relu"):
        program.input_of("relu")


def test_what_an_operation_is() -> None:
    def function(x: torch.Tensor) -> tuple:
        noise, mask = aten.native_dropout(x, 0.5, True)
        return (noise.t(), mask, torch.rand(3), x.relu(), x.split(1)[0])

    program = trace(function, X)
    nodes = {node.name: node for node in program.calls}
    assert {name for name, node in nodes.items() if is_random(node)} == {"native_dropout", "rand"}
    assert {name for name, node in nodes.items() if is_view(node)} == {"t", "split"}
    assert {name for name, node in nodes.items() if is_any_view(node)} == {"t", "split"}
    unsafe = fx.Graph().call_function(torch.ops.aten._unsafe_view.default, (nodes["t"], [4]))
    assert is_any_view(unsafe) and not is_view(unsafe)
    assert not is_effectful(nodes["relu"]) and not is_effectful(nodes["getitem"])
    assert len(tensors_of(nodes["split"])) == 2 and tensors_of(program.placeholders[0])[0].shape == (2, 3)
    graph = fx.Graph()
    condition = graph.placeholder("condition")
    assert is_effectful(graph.call_function(aten._assert_async.msg, (condition, "no")))
    assert is_effectful(graph.call_function(torch.relu, (condition,)))
    assert not is_effectful(graph.call_function(operator.getitem, (condition, 0)))
    assert not is_random(graph.call_function(torch.rand, (3,)))  # no operator, hence effectful


def test_arguments_by_name_with_their_defaults() -> None:
    x = fx.Graph().placeholder("x")
    softmax = x.graph.call_function(aten._softmax.default, (x, -1), {"half_to_float": True})
    assert [argument(softmax, name) for name in ("self", "dim", "half_to_float", "eps")] == [x, -1, True, None]
    assert argument(x.graph.call_function(aten.sum.dim_IntList, (x, [0])), "keepdim") is False


def test_the_source_line_is_the_users() -> None:
    (relu,) = capture(torch.nn.ReLU(), X).calls
    assert re.fullmatch(r".*activation\.py:\d+, return F\.relu\(input, inplace=self\.inplace\)", source_line(relu))
    relu.meta["stack_trace"] = '  File "a.py", line 3, in f\n    y = g(x)\n  File "b.py", line 7, in g\n    return -x\n'
    assert source_line(relu) == "b.py:7, return -x"
    relu.meta["stack_trace"] = 'File "b.py", line 7, in g'
    assert source_line(relu) == "b.py:7"
    del relu.meta["stack_trace"]
    assert source_line(relu) == ""


def test_an_operator_that_views_a_number_is_no_view():
    graph = fx.Graph()
    number = graph.call_function(torch.ops.aten._conj.default, (1j,))
    of_value = graph.call_function(torch.ops.aten._conj.default, (graph.placeholder("z"),))
    assert not is_view(number) and is_view(of_value)
