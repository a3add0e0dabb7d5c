"""A recipe through the training front door, from AOTAutograd on: all that `memopt.compile` does but Dynamo."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from memopt.backends.aten import AtenBackend
from memopt.capture.dynamo import Hooks
from memopt.program import InputKind, Program
from memopt.step.call_role import CallRole
from memopt.step.plan_request import PlanRequest
from tests.instructions import Recipe, execute, leaf_steps, leaves_of
from tests.oracle import eager, in_float64, reference


class Body(torch.nn.Module):
    """The recipe as one module that takes every leaf as an argument."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def forward(self, *leaves: Tensor) -> tuple[Any, ...]:
        values = execute(self.recipe, leaves)
        return tuple(values[i] for i in self.recipe.outputs)


class RewriteOnly:
    """A session that applies one function to the joint program, and leaves inference programs as they are."""

    role = CallRole()

    dry = False
    early = None

    def __init__(self, rewrite: Callable[[Program], Program]) -> None:
        self.rewrite = rewrite

    def names(self) -> dict[int, tuple[InputKind, str]]:
        return {}

    def training(self, program: Program, graph_break: bool, request: PlanRequest | None) -> Program:
        return self.rewrite(program)

    def inference(self, program: Program) -> Program:
        return program


def trainable_leaves(recipe: Recipe) -> list[Tensor]:
    """Fresh leaves; floating-point parameters require gradients."""
    leaves = leaves_of(recipe)
    for step, leaf in zip(leaf_steps(recipe), leaves, strict=True):
        leaf.requires_grad_(step.op == "parameter" and leaf.is_floating_point())
    return leaves


def compile_step(recipe: Recipe, rewrite: Callable[[Program], Program]) -> Callable[..., Any]:
    """The recipe's training step on the aten backend, its joint program rewritten."""
    graph = fx.Graph()
    placeholders = [graph.placeholder(f"{step.op}{i}") for i, step in enumerate(leaf_steps(recipe))]
    body = graph.call_module("body", tuple(placeholders))
    graph.output(tuple(graph.call_function(operator.getitem, (body, i)) for i in range(len(recipe.outputs))))
    root = torch.nn.Module()
    root.body = Body(recipe)
    leaves = trainable_leaves(recipe)
    module = fx.GraphModule(root, graph)
    return AtenBackend().compile_captured(module, leaves, Hooks(RewriteOnly(rewrite), module, leaves))


def step_results(recipe: Recipe, function: Callable[..., Any], seed: int = 0) -> list[Any]:
    """Outputs, gradients of the parameters (zero where there is none) and new buffers after one step of `function`."""
    leaves = trainable_leaves(recipe)
    torch.default_generator.manual_seed(seed)
    return results_of(recipe, leaves, function(*leaves))


def results_of(recipe: Recipe, leaves: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> list[Any]:
    """The outputs, the gradients of the leaves that require one, and the buffers. User leaves may be None."""
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = [value for value in outputs if value.requires_grad]
    tangents = [tangent_for(value) for value in found]
    gradients = torch.autograd.grad(found, wanted, tangents, allow_unused=True)
    filled = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(wanted, gradients, strict=True)]
    buffers = [leaf for step, leaf in zip(leaf_steps(recipe), leaves, strict=True) if step.op == "buffer"]
    return [value.detach() for value in (*outputs, *filled, *buffers)]


def tangent_for(value: Tensor) -> Tensor:
    """A fixed gradient of an output, small integers over eight, so that it is exact in every dtype."""
    return ((torch.arange(value.numel()).reshape(value.shape) * 5 + 3) % 11 / 8).to(value.dtype)


def exact_step(recipe: Recipe, noise: int | None, seed: int = 0) -> list[Any]:
    """The step's results in float64; with `noise`, every forward result and its gradient is off by one rounding."""
    trace, _ = eager(recipe, seed=seed)
    leaves = in_float64(leaves_of(recipe))
    for step, leaf in zip(leaf_steps(recipe), leaves, strict=True):
        leaf.requires_grad_(step.op == "parameter" and leaf.is_floating_point())
    found = reference(recipe, trace, leaves, noise, seed)
    return results_of(recipe, leaves, [found[i] for i in recipe.outputs])


def joint_arguments(recipe: Recipe, program: Program) -> list[Tensor]:
    """Values for `Program.run` of a joint program: the leaves, then one tangent for each tangent input."""
    values = iter([leaf.detach() for leaf in trainable_leaves(recipe)])
    tangents = [
        tangent_for(torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype))
        for node, entry in zip(program.placeholders, program.inputs, strict=True)
        if entry.kind is InputKind.TANGENT
    ]
    given = iter(tangents)
    return [
        next(given) if entry.kind is InputKind.TANGENT else next(values)
        for entry in program.inputs
        if entry.kind is not InputKind.CONSTANT
    ]
