"""Programs for the tests of passes, from plain functions: as they are traced, with nothing tidied up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from functorch.compile import aot_function, default_partition
from torch.fx.experimental.proxy_tensor import make_fx

from memopt.capture.joint import Origin, from_joint
from memopt.pass_manager import Pass, PassResult
from memopt.program import Input, InputKind, Output, OutputKind, Program
from tests.support import apply, assert_same


def trace(
    function: Callable[..., Any],
    *tensors: torch.Tensor,
    kinds: Mapping[int, InputKind] | None = None,
    mutated: Mapping[int, int] | None = None,
    keep: int | None = None,
) -> Program:
    """The inference program of `function(*tensors)`, which returns a tuple.

    Args:
        function: a function of tensors.
        tensors: its arguments.
        kinds: by position, which arguments are parameters, buffers or constants (with their values); others are USER.
        mutated: by position of the output, the position of the argument whose new value it is.
        keep: how many leading outputs the program has; what only the others need is dead.
    """
    module = make_fx(function, tracing_mode="fake")(*tensors)
    values = list(module.graph.output_node().args[0])
    module.graph.output_node().args = (values[:keep],)
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    roles = dict.fromkeys(range(len(names)), InputKind.USER) | dict(kinds or {})
    inputs = tuple(
        Input(name, roles[i], None if roles[i] in (InputKind.USER, InputKind.CONSTANT) else f"m.{name}")
        for i, name in enumerate(names)
    )
    outputs = tuple(
        Output(OutputKind.MUTATION, names[mutated[i]]) if mutated and i in mutated else Output(OutputKind.USER)
        for i in range(len(values[:keep]))
    )
    state = {name: tensors[i].detach() for i, name in enumerate(names) if roles[i] is not InputKind.USER}
    program = Program(module, inputs, outputs, state).copy().finish()
    program.check()
    return program


def capture_joint(
    function: Callable[..., Any], *tensors: torch.Tensor, decompositions: Mapping[Any, Any] | None = None
) -> Program:
    """The training program of `function(*tensors)`; tensors that require a gradient are its parameters."""
    found: list[Program] = []
    origins = [
        Origin(InputKind.PARAMETER, f"p{i}", value.detach())
        if value.requires_grad
        else Origin(InputKind.USER, None, None)
        for i, value in enumerate(tensors)
    ]

    def partition(joint: Any, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **options: Any) -> Any:
        found.append(from_joint(joint, num_fwd_outputs, origins))
        return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)

    aot_function(
        function,
        lambda graph, _: graph,
        lambda graph, _: graph,
        partition_fn=partition,
        decompositions=dict(decompositions or {}),
    )(*tensors)
    return found[0]


def arguments(program: Program, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The arguments of `program.run`: the tensors but constants, then a random tangent per forward output."""
    generator = torch.Generator().manual_seed(1)
    values = [
        tensor.detach()
        for tensor, entry in zip(tensors, program.inputs, strict=False)
        if entry.kind is not InputKind.CONSTANT
    ]
    for entry, node in zip(program.inputs, program.placeholders, strict=True):
        if entry.kind is InputKind.TANGENT:
            values.append(torch.randn(node.meta["val"].shape, generator=generator))
    return values


def check(item: Pass, program: Program, *tensors: torch.Tensor) -> PassResult:
    """Apply the pass; outputs must be the same bits, with the same strides, and share memory with what they did."""
    result = apply(item, program)
    values = arguments(program, *tensors)
    found, expected = [], []
    for each, into in ((result.program, found), (program, expected)):
        torch.manual_seed(0)
        into.extend(each.run(*values))
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.stride() == b.stride()
            if b.is_complex():
                a, b = torch.view_as_real(a), torch.view_as_real(b)
            assert torch.equal(torch.isnan(a), torch.isnan(b))
            assert_same(torch.signbit(a[~torch.isnan(a)]), torch.signbit(b[~torch.isnan(b)]))
    assert_same(found, expected)
    assert _sharing(found, values) == _sharing(expected, values)
    assert [entry for entry in result.program.inputs if entry.kind is not InputKind.CONSTANT] == [
        entry for entry in program.inputs if entry.kind is not InputKind.CONSTANT
    ]
    known = {node.name for node in result.program.graph.nodes}
    old = {node.name for node in program.graph.nodes}
    for change in result.changes:
        assert set(change.before) <= old and set(change.after) <= known
    assert {refusal.node for refusal in result.refusals} <= old
    return result


def _sharing(outputs: Sequence[Any], values: Sequence[torch.Tensor]) -> list[int | None]:
    """Per output, the index of the first argument or output with the same storage."""
    pointers = [
        value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None for value in (*values, *outputs)
    ]
    return [pointers.index(pointer) if pointer else None for pointer in pointers[len(values) :]]


def reasons(result: PassResult) -> dict[str, str]:
    """The refusals, as node → reason."""
    return {refusal.node: refusal.reason for refusal in result.refusals}


def residual(layers: int, rows: int = 64, *, gradient: bool = False) -> Program:
    """The training program of residual layers; `gradient`: of its input, too."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(layers):
            x = torch.nn.functional.gelu(x @ w).sin() + x
        return (x,)

    x = torch.linspace(-1, 1, rows * 32).reshape(rows, 32).requires_grad_(gradient)
    return capture_joint(function, x, _weight())


def classified(classes: int = 256) -> Program:
    """The training program of a few layers with a cross-entropy over so many classes."""

    def loss(x: torch.Tensor, w: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.nn.functional.gelu(x @ w)
        return torch.nn.functional.cross_entropy(x @ head, labels)

    x, head = torch.randn(512, 32), torch.randn(32, classes, requires_grad=True)
    return capture_joint(loss, x, _weight(), head, torch.randint(0, classes, (512,)))


def _weight() -> torch.Tensor:
    return torch.linspace(-0.3, 0.3, 32 * 32).reshape(32, 32).requires_grad_()
