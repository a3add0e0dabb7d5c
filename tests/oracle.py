"""What a recipe must compute: a cheap capture of it, its eager values, and a float64 bound on rounding."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import reject
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from memopt.program import Input, InputKind, Output, OutputKind, Program
from tests.instructions import (
    FLOATS,
    INPLACE,
    LEAVES,
    REFERENCE,
    VIEWS,
    Recipe,
    apply_step,
    execute,
    leaf_steps,
    leaves_of,
)

NOISY_RUNS = 2


def program_of(recipe: Recipe) -> Program:
    """The recipe's inference program, traced in milliseconds; its user outputs come first, its new buffers last.

    A recipe that torch itself cannot trace is no example of the test.
    """

    def function(*leaves: Tensor) -> list[Any]:
        values = execute(recipe, leaves)
        return [values[i] for i in recipe.outputs]

    leaves = leaves_of(recipe)
    try:
        with torch.no_grad(), enable_python_dispatcher():
            traced = make_fx(functionalize(function, remove="mutations"), tracing_mode="fake")(*leaves)
    except ValueError:  # where fake strides differ from real ones, torch may find no view
        reject()
    if any(node.target is torch.ops.aten.as_strided_.default for node in traced.graph.nodes):
        reject()  # of torch's own decomposition of a pool, which the front doors trace otherwise
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    output = traced.graph.output_node()
    results, outputs = list(output.args[0]), [Output(OutputKind.USER) for _ in recipe.outputs]
    for node in list(traced.graph.nodes):
        if node.target is torch.ops.aten.copy_.default:
            results.append(node.args[1])
            outputs.append(Output(OutputKind.MUTATION, node.args[0].name))
            traced.graph.erase_node(node)
    output.args = (results,)
    inputs, state = [], {}
    for step, node, leaf in zip(leaf_steps(recipe), placeholders, leaves, strict=True):
        kind = InputKind(step.op)
        inputs.append(Input(node.name, kind, node.name if kind is not InputKind.USER else None))
        if kind is not InputKind.USER:
            state[node.name] = leaf
    module = fx.GraphModule(traced, traced.graph)
    return Program(module, tuple(inputs), tuple(outputs), state).copy().finish()


def arguments(program: Program, recipe: Recipe) -> list[Tensor]:
    """Fresh values of all inputs but the program's own constants, in order."""
    leaves = leaves_of(recipe)
    remaining = iter(leaves[i] for i, step in enumerate(leaf_steps(recipe)) if step.op != "constant")
    return [next(remaining) for entry in program.inputs if entry.kind is not InputKind.CONSTANT]


def eager(recipe: Recipe, program: Program | None = None, seed: int = 0) -> tuple[list[Tensor], list[Any]]:
    """A trace of eager PyTorch's values, and the outputs in the order of `program_of`'s (new buffers last)."""
    leaves, trace = leaves_of(recipe), []
    torch.default_generator.manual_seed(seed)
    with torch.no_grad():
        values = execute(recipe, leaves, trace)
    return trace, outputs_of(recipe, values, leaves, program)


def outputs_of(recipe: Recipe, values: Sequence[Any], leaves: Sequence[Tensor], program: Program | None) -> list[Any]:
    """The user outputs, then what the written leaves hold now, as the program orders them."""
    found = [values[i] for i in recipe.outputs]
    if program is not None:
        names = {entry.name: leaf for entry, leaf in zip(program.inputs, leaves, strict=False)}
        found += [names[str(entry.target)] for entry in program.outputs if entry.kind is OutputKind.MUTATION]
    return found


def reference(
    recipe: Recipe, trace: Sequence[Tensor], leaves: Sequence[Tensor], noise: int | None, seed: int
) -> list[Any]:
    """All values in float64; with `noise`, each result is off by up to one rounding of the dtype that eager gave it.

    Integers and booleans are eager's own: where a comparison falls on the other side, the rest would not be comparable.

    Args:
        recipe: the recipe.
        trace: what eager's values were when they were made.
        leaves: the leaves in float64.
        noise: the seed of the roundings, or None for none.
        seed: the seed of the recipe's own random steps.
    """
    generator = torch.Generator().manual_seed(noise or 0)
    found: list[Any] = []
    remaining = iter(leaves)
    torch.default_generator.manual_seed(seed)
    for step in recipe.steps:
        if step.op in LEAVES:
            found.append(next(remaining))
            continue
        if step.op in REFERENCE:
            result = REFERENCE[step.op](*(found[i] for i in step.operands), *step.params)
        else:
            params = tuple("float64" if isinstance(p, str) and p in FLOATS else p for p in step.params)
            result = apply_step(type(step)(step.op, step.operands, params), found)
        for value in result if isinstance(result, (tuple, list)) else (result,):
            made, kept = trace[len(found)], step.op in VIEWS or step.op in INPLACE
            if not value.dtype.is_floating_point:
                value = value if kept else made.clone()
            else:
                value = value if kept else value.double()
                if noise is not None and made.is_floating_point() and step.op not in VIEWS and value.numel():
                    _perturb(value, torch.finfo(made.dtype).eps, generator)
            found.append(value)
    return found


def _perturb(value: Tensor, eps: float, generator: torch.Generator) -> None:
    """Change the value by up to `eps` of its largest element, unseen by autograd."""
    if torch._debug_has_internal_overlap(value) != 1:
        data = value.data
        error = torch.rand(data.shape, generator=generator, dtype=torch.float64) * 2 - 1
        data.add_(error * float(data.abs().max()) * eps)


def in_float64(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [leaf.double() if leaf.is_floating_point() else leaf for leaf in leaves]


class Bound:
    """How far results may lie from the float64 ones: twice eager's error, or twice what roundings can make of it."""

    def __init__(self, recipe: Recipe, program: Program | None = None, seed: int = 0) -> None:
        self.recipe, self.program, self.seed = recipe, program, seed
        self.trace, self.eager = eager(recipe, program, seed)

    @functools.cached_property
    def runs(self) -> list[list[Any]]:
        """The outputs in float64: first the exact ones, then those with roundings."""
        found = []
        for noise in (None, *range(1, NOISY_RUNS + 1)):
            leaves = in_float64(leaves_of(self.recipe))
            with torch.no_grad():
                values = reference(self.recipe, self.trace, leaves, noise, self.seed)
            found.append(outputs_of(self.recipe, values, leaves, self.program))
        return found

    def check(self, found: Sequence[Any]) -> None:
        """Raise AssertionError unless each result is within its bound; integers and booleans must be equal."""
        assert len(found) == len(self.eager)
        if same_bits(found, self.eager) is None:
            return
        for index, value in enumerate(found):
            exact, *noisy = (run[index] for run in self.runs)
            within(value, self.eager[index], exact, noisy, f"output {index}")


def within(found: Tensor, eager: Tensor, exact: Tensor, noisy: Sequence[Tensor], what: str) -> None:
    """Raise AssertionError unless `found` is about as near to the float64 value as eager's result is."""
    assert (found.dtype, found.shape) == (eager.dtype, eager.shape), f"{what}: {found.dtype}{list(found.shape)}"
    if not found.dtype.is_floating_point:
        assert torch.equal(found, eager), f"{what}: integers differ"
        return
    if torch.equal(found, eager) or not found.numel():
        return
    error, allowed = far(found, exact), max(far(other, exact) for other in (eager, *noisy))
    few_ulps = 4 * torch.finfo(found.dtype).eps * float(exact.detach().abs().max())
    assert error <= 2 * allowed + few_ulps, f"{what}: off by {error}, eager by {far(eager, exact)}, bound {allowed}"


def far(a: Tensor, exact: Tensor) -> float:
    return float((a.detach().double() - exact.detach()).abs().max())


def same_bits(found: Sequence[Any], expected: Sequence[Any]) -> str | None:
    """None when all are bitwise equal, of the same dtypes, shapes and strides; else where they differ."""
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if a is not b and a != b:
                return f"output {index}: {a!r} instead of {b!r}"
        elif (a.dtype, a.shape) != (b.dtype, b.shape) or not torch.equal(a, b):
            return f"output {index}: {a} instead of {b}"
    return None
