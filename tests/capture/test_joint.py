"""Joint graphs: phases of nodes, kinds of inputs and outputs; forward and backward graphs that train as eager does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import memopt
from memopt.backends.aten import AtenBackend
from memopt.capture.dynamo import Hooks
from memopt.capture.joint import constants_to_attributes, split
from memopt.graph.rewrite import storages
from memopt.program import Input, InputKind, Output, OutputKind, Phase, Program, is_random
from tests.joint import RewriteOnly
from tests.passes.build import capture_joint
from tests.support import assert_same

X = torch.linspace(-1, 1, 12).reshape(4, 3)


def crossing(program):
    """The forward call nodes whose values backward reads."""
    return [
        node
        for node in program.calls
        if node.meta["phase"] is Phase.FORWARD and any(user.meta.get("phase") is Phase.BACKWARD for user in node.users)
    ]


def weight() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-2, 2, 15).reshape(3, 5))


def phases(program: Program) -> dict[str, Phase]:
    return {node.name: node.meta["phase"] for node in program.calls}


def captured(function: Callable[..., Any], *tensors: torch.Tensor) -> Program:
    program = capture_joint(function, *tensors)
    program.check()
    assert program.training
    return program


class Body(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> Any:
        return self.function(x, w)


def through_the_front_door(function: Callable[..., Any], results: int = 1) -> tuple[Callable[..., Any], Program]:
    """The function of x and a weight compiled by AOTAutograd, cut as its program says, and the program."""
    seen: list[Program] = []
    root = nn.Module()
    root.body = Body(function)
    graph = fx.Graph()
    body = graph.call_module("body", (graph.placeholder("x"), graph.placeholder("w")))
    items = (graph.call_function(operator.getitem, (body, index)) for index in range(results))
    graph.output((body,) if results == 1 else tuple(items))
    module = fx.GraphModule(root, graph)
    example = [X.clone().requires_grad_(), weight()]
    hooks = Hooks(RewriteOnly(lambda program: seen.append(program) or program), module, example)
    compiled = AtenBackend().compile_captured(module, example, hooks)
    compiled(*example)
    return lambda x, w: compiled(x, w)[0], seen[0]


class MaskedInBackward(torch.autograd.Function):
    """Draws in forward what only backward reads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.rand_like(x))
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (mask,) = ctx.saved_tensors
        return gradient * mask


class NoisyBackward(torch.autograd.Function):
    """Draws in backward, once from the gradient and once from nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.rand_like(gradient) + torch.rand(4, 3)


# -- phases ---------------------------------------------------------------------------------------------------------


def test_forward_is_what_the_forward_outputs_need() -> None:
    program = captured(lambda x, w: ((x @ w).relu().sum(), x.sin()), X, weight())
    found = phases(program)
    assert {name for name, phase in found.items() if phase is Phase.FORWARD} == {"mm", "relu", "sum_1", "sin"}
    assert list(found.values()) == sorted(found.values(), key=lambda phase: phase is Phase.BACKWARD)
    assert program.forward_outputs == 2
    assert [node.name for node in program.output_nodes[:2]] == ["sum_1", "sin"]


def test_dropout_is_drawn_in_forward_and_its_mask_crosses() -> None:
    program = captured(lambda x, w: F.dropout(x @ w, 0.5).sum(), X, weight())
    found = phases(program)
    assert found["native_dropout"] is found["getitem"] is found["getitem_1"] is Phase.FORWARD
    assert [node.name for node in crossing(program)] == ["getitem_1"]


def test_the_gradient_of_a_dropout_lies_as_it_was_traced() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        return F.dropout((x @ w).view(2, 2, 5), 0.5).transpose(0, 1).contiguous().sin()

    x, parameter, found = X.clone().requires_grad_(), weight(), []
    for run in (function, through_the_front_door(function)[0]):
        torch.manual_seed(0)
        found.append(torch.autograd.grad(run(x, parameter).square().sum(), [x, parameter]))
    torch.testing.assert_close(found[1], found[0])


def test_random_nodes_stay_where_they_were_drawn() -> None:
    program = captured(MaskedInBackward.apply, X.clone().requires_grad_())
    (draw,) = [node for node in program.calls if is_random(node)]
    assert draw.meta["phase"] is Phase.FORWARD and draw in crossing(program)
    program = captured(NoisyBackward.apply, X.clone().requires_grad_())
    draws = [node for node in program.calls if is_random(node)]
    assert [node.meta["phase"] for node in draws] == [Phase.BACKWARD] * 2


def test_crossing_values_are_read_by_backward() -> None:
    program = captured(lambda x, w: ((x @ w).sin().exp() + 1).sum(), X, weight())
    assert [node.name for node in crossing(program)] == ["mm", "exp"]


# -- roles ----------------------------------------------------------------------------------------------------------


def test_inputs_and_outputs_have_their_roles() -> None:
    def function(x: torch.Tensor, w: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count.add_(1)
        return (x @ w).sum(0), count * 2

    w = weight()
    program = captured(function, X, w, torch.zeros(2))
    assert program.inputs == (
        Input("primals_1", InputKind.USER),
        Input("primals_2", InputKind.PARAMETER, "p1"),
        Input("primals_3", InputKind.USER),
        Input("tangents_1", InputKind.TANGENT),
    )
    user, mutation = Output(OutputKind.USER), Output(OutputKind.MUTATION, "primals_3")
    assert program.outputs == (mutation, user, user, user, Output(OutputKind.GRADIENT, "primals_2"), user)
    assert [value is None for value in program.output_nodes] == [False, False, False, True, False, True]
    assert program.forward_outputs == 3
    assert program.state.keys() == {"primals_2"} and program.state["primals_2"].data_ptr() == w.data_ptr()


def test_a_parameter_without_gradient_has_a_none_output() -> None:
    program = captured(lambda x, w, v: (x @ w).sum() + v.detach().sum(), X, weight(), weight())
    assert program.output_nodes[-1] is None and program.output_nodes[-2] is not None
    assert program.outputs[-2] == Output(OutputKind.GRADIENT, "primals_2")


def test_a_tangent_has_memory_of_its_own_where_the_result_is_a_view_of_an_input() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x @ w, *w.unbind()[:2])

    program = through_the_front_door(function, 3)[1]
    places = {entry.kind: [] for entry in program.inputs}
    for node in program.placeholders:
        places[program.input_of(node.name).kind] += storages(node)
    tangents = places.pop(InputKind.TANGENT)
    assert len(set(tangents)) == len(tangents) == 3
    assert all(set(tangents).isdisjoint(found) for found in places.values())


def test_the_joint_program_computes_outputs_and_gradients() -> None:
    w = weight()
    program = captured(lambda x, w: (x @ w).relu().sum(0), X, w)
    tangent = torch.arange(5.0)
    result, _, gradient = program.run(X, w.detach(), tangent)
    expected = (X @ w).relu().sum(0)
    assert_same(result, expected.detach())
    assert_same(gradient, torch.autograd.grad(expected, w, tangent)[0])


# -- constants ------------------------------------------------------------------------------------------------------


def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ w) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).sum()


def test_tensors_of_the_graph_are_constant_inputs_and_attributes_again_for_a_call() -> None:
    _, program = through_the_front_door(scaled)
    (constant,) = [entry for entry in program.inputs if entry.kind is InputKind.CONSTANT]
    assert torch.equal(program.state[constant.name], torch.arange(1.0, 6))
    before = str(program.graph)
    module = constants_to_attributes(program)
    assert str(program.graph) == before
    assert [node.name for node in module.graph.nodes if node.op == "placeholder"] == [
        entry.name for entry in program.inputs if entry is not constant
    ]
    (attribute,) = [node for node in module.graph.nodes if node.op == "get_attr"]
    assert "val" in attribute.meta and "phase" not in attribute.meta
    arguments = (X, weight().detach(), torch.tensor(2.0))
    assert_same(module(*arguments), program.run(*arguments))


# -- forward and backward graphs ------------------------------------------------------------------------------------


def test_saved_is_what_crosses_and_the_inputs_that_backward_reads() -> None:
    program = captured(lambda x, w: (x @ w).tanh().sum(), X.clone().requires_grad_(), weight())
    module, saved = split(program, lambda module, saved: (module, saved))
    assert [node.name for node in saved] == ["primals_1", "primals_2", "tanh"]
    assert all(node.graph is module.graph and node.graph is not program.graph for node in saved)


def batch_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x @ w, None, None, training=True).sigmoid().sum(0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (x @ w).relu().sum(0),
        lambda x, w: F.dropout((x @ w).exp(), 0.3).sum(0),
        lambda x, w: F.log_softmax(F.dropout(x @ w).relu() @ w.t(), -1).square(),
        scaled,
        batch_norm,
    ],
)
def test_both_graphs_give_eager_outputs_and_gradients(function: Callable[..., torch.Tensor]) -> None:
    def step(run: Callable[..., Any]) -> list[torch.Tensor]:
        x, w = X.clone().requires_grad_(), weight()
        torch.manual_seed(3)
        result = run(x, w)
        tangent = torch.linspace(1, 2, result.numel()).reshape(result.shape)
        twice = [torch.autograd.grad(result, (x, w), tangent, retain_graph=True) for _ in range(2)]
        assert_same(twice[0], twice[1])
        return [result.detach(), *twice[0]]

    compiled, program = through_the_front_door(function)
    assert_same(step(compiled), step(function))
    program.check()


class Saved(torch.autograd.Function):
    """x · w, whose gradients are said to be a value of forward and an input."""

    @staticmethod
    def forward(ctx, x, w):
        product = x * w
        ctx.save_for_backward(product, w)
        return product

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors


def test_a_gradient_that_is_a_value_of_forward_is_saved() -> None:
    def step(run) -> list[torch.Tensor]:
        x, w = X.clone().requires_grad_(), torch.full((4, 3), 2.0).requires_grad_()
        outputs = run(x, w)
        outputs.sum().backward()
        return [outputs, x.grad, w.grad]

    class Model(nn.Module):
        def forward(self, x, w):
            return Saved.apply(x, w)

    for actual, expected in zip(step(memopt.compile(Model(), backend="aten")), step(Model()), strict=True):
        assert torch.equal(actual, expected)
