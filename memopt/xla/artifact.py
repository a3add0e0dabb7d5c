"""A program as one portable StableHLO artifact: for CPU and CUDA at once, weights as arguments, batch size open."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import torch
from torch import fx

from memopt.errors import first_line
from memopt.program import Input, InputKind, Output, Program
from memopt.torch_compat import pytree
from memopt.xla.legalize import where
from memopt.xla.lower import VARIED, Lowered, lower, precision
from memopt.xla.table import LowerError


@dataclasses.dataclass(frozen=True, eq=False)
class Artifact:
    """A program under XLA, ahead of any device.

    Attributes:
        exported: JAX's own record: `mlir_module_serialized` is the StableHLO, `calling_convention_version` its version,
            `module_kept_var_idx` the arguments that it takes (those that nothing reads are left out), `in_avals` and
            `out_avals` their shapes, with symbolic sizes where these vary.
        inputs: one entry per argument, in order: the program's inputs that are tensors. Behind them comes a key,
            uint32[2], where `random` is set.
        outputs: one entry per result, in order: the program's outputs that are tensors.
        plain: the program's other outputs by position among all of its outputs: numbers, or None.
        state: weights, buffers and constants by input name, as the program holds them.
        random: whether the program draws random numbers.
        x64: whether it holds 64-bit numbers: trace or call it inside `memopt.xla.lower.precision(x64)`.
    """

    exported: jax.export.Exported
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    plain: Mapping[int, Any]
    state: Mapping[str, torch.Tensor] = dataclasses.field(repr=False)
    random: bool
    x64: bool

    @property
    def kept(self) -> tuple[int, ...]:
        """Which of the arguments the module takes."""
        return tuple(self.exported.module_kept_var_idx)

    def call(self, *arguments: Any) -> list[Any]:
        """Run it through JAX on this machine: one array per argument; one array per result."""
        with precision(self.x64):
            return list(self.exported.call(*arguments))


def to_artifact(
    program: Program,
    others: Sequence[Program] = (),
    *,
    platforms: Sequence[str] = ("cpu", "cuda"),
    symbol: str = "batch",
) -> Artifact:
    """Export a program as StableHLO.

    Args:
        program: an inference program (rewritten or as captured).
        others: the same model captured, and rewritten by the same passes, at two or more other batch sizes. Every size
            that differs between them must be a whole linear function of the first input size that differs; it varies
            in the artifact. The third capture is there to find what is not linear. Empty: all shapes are fixed.
        platforms: where the artifact must run: "cpu", "cuda".
        symbol: the name of the size that varies.

    Raises:
        LowerError: an operator has no lowering, or the size cannot vary; one line names the operator.
        ValueError: `others` holds one program only.
    """
    if len(others) == 1:
        raise ValueError("sizes vary only between three captures or more: two cannot tell what is linear")
    lowered = lower(program, platform=platforms[0] if len(platforms) == 1 else None)
    arguments: list[Any] = lowered.arguments()
    state = dict(program.state)
    wanted: dict[int, tuple[Any, ...]] = {}
    if others:
        arguments, wanted = _vary(lowered, (program, *others), symbol)
        for index in wanted:
            name = program.inputs[index].name
            state[name] = _one(state[name], arguments[index].shape)
    results = list(lowered.module.graph.output_node().args[0])  # type: ignore[arg-type]
    tensors = [isinstance(result, fx.Node) and isinstance(result.meta["val"], torch.Tensor) for result in results]
    taken = [index for index, argument in enumerate(arguments) if argument is not None]

    def function(*given: Any) -> list[Any]:
        values: list[Any] = [None] * len(arguments)
        for index, value in zip(taken, given, strict=True):
            values[index] = value if index not in wanted else jnp.broadcast_to(value, wanted[index])
        return [value for value, tensor in zip(lowered.function(*values), tensors, strict=True) if tensor]

    with precision(lowered.x64):
        try:
            exported = jax.export.export(jax.jit(function), platforms=list(platforms))(*(arguments[i] for i in taken))
        except LowerError:
            raise
        except Exception as error:
            raise LowerError(f"the program cannot be exported: {first_line(error)}") from error
    return Artifact(
        exported,
        tuple(program.inputs[index] for index in taken if index < len(program.inputs)),
        tuple(output for output, tensor in zip(program.outputs, tensors, strict=True) if tensor),
        {index: results[index] for index, tensor in enumerate(tensors) if not tensor},
        state,
        lowered.random,
        lowered.x64,
    )


# -- sizes that vary --------------------------------------------------------------------------------------------------


class _Sizes:
    """Numbers that differ between captures, as whole linear functions of the size that varies."""

    def __init__(self, points: Sequence[int], symbol: str) -> None:
        self.points = points
        (self.dimension,) = jax.export.symbolic_shape(symbol)

    def of(self, values: Sequence[Any]) -> Any:
        """What stands for a value that the captures have each its own of. Raises ValueError where nothing does."""
        first, second = values[0], values[1]
        if all(type(value) is type(first) and value == first for value in values):
            return first
        if any(not isinstance(value, int) or isinstance(value, bool) for value in values):
            raise ValueError(f"{', '.join(map(repr, values))} at sizes {', '.join(map(str, self.points))}")
        factor = (second - first) // (self.points[1] - self.points[0])
        rest = first - factor * self.points[0]
        if any(factor * point + rest != value for point, value in zip(self.points, values, strict=True)):
            raise ValueError(f"{', '.join(map(str, values))} at sizes {', '.join(map(str, self.points))}")
        return factor * self.dimension + rest

    def shape(self, shapes: Sequence[Sequence[int]]) -> tuple[Any, ...]:
        """The same for each axis of a shape."""
        return tuple(self.of(sizes) for sizes in zip(*shapes, strict=True))


def _vary(lowered: Lowered, programs: Sequence[Program], symbol: str) -> tuple[list[Any], dict[int, tuple[Any, ...]]]:
    """Write the sizes that differ between captures into the first one's graph.

    Returns:
        The arguments' shapes, and by position the shapes that constants are stretched to.
    """
    every = [lowered, *(lower(program) for program in programs[1:])]
    nodes = [list(one.module.graph.nodes) for one in every]
    if any([_kind(node) for node in others] != [_kind(node) for node in nodes[0]] for others in nodes[1:]):
        raise LowerError("the model is another graph at another size: its shapes are fixed")
    arguments: list[Any] = lowered.arguments()
    shapes = [[one.shape for one in found] if found[0] is not None else None for found in _columns(every)]
    kinds = [entry.kind for entry in programs[0].inputs]
    points = next(
        (
            sizes
            for kind, found in zip(kinds, shapes, strict=False)
            if kind is InputKind.USER and found
            for sizes in zip(*found, strict=True)
            if len(set(sizes)) > 1
        ),
        None,
    )
    if points is None or len(set(points)) < len(points):
        raise LowerError("no input has another size in each capture: nothing can vary")
    sizes, wanted = _Sizes(points, symbol), {}
    for index, (entry, found) in enumerate(zip(programs[0].inputs, shapes, strict=False)):
        if found is None:
            continue
        name = entry.target or entry.name
        try:
            shape = sizes.shape(found)
        except ValueError as error:
            raise LowerError(f"{name} cannot vary in size: {error}") from None
        if entry.kind is InputKind.USER:
            arguments[index] = jax.ShapeDtypeStruct(shape, arguments[index].dtype)
            continue
        if len(set(found)) > 1:
            least = tuple(axis[0] if len(set(axis)) == 1 else 1 for axis in zip(*found, strict=True))
            arguments[index], wanted[index] = jax.ShapeDtypeStruct(least, arguments[index].dtype), shape
        values = [program.state[entry.name] for program in programs]
        if not _is_one_value(values, arguments[index].shape):
            raise LowerError(f"{name} has other values at another size: a constant was folded for one size")
    twins = [dict(zip(others, nodes[0], strict=True)) for others in nodes]
    for column in zip(*nodes, strict=True):
        if column[0].op in ("call_function", "output"):
            _merge(column, twins, sizes)
    return arguments, wanted


def _columns(every: Sequence[Lowered]) -> Any:
    return zip(*(one.arguments() for one in every), strict=True)


def _kind(node: fx.Node) -> Any:
    return node.op, node.target if node.op == "call_function" else None


def _one(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The first elements along the axes that are to have length one."""
    return value[tuple(slice(0, size) for size in shape)].contiguous()


def _is_one_value(values: Sequence[torch.Tensor], shape: Sequence[int]) -> bool:
    """Whether all are one value of this shape, stretched."""
    if all(value is values[0] for value in values):
        return True
    first = _one(values[0], shape)
    return all(value.dtype == first.dtype and torch.equal(first.expand(value.shape), value) for value in values)


def _merge(column: Sequence[fx.Node], twins: Sequence[Mapping[fx.Node, fx.Node]], sizes: _Sizes) -> None:
    """Give the first of the nodes operands that stand for those of all."""
    node = column[0]
    flat = [
        pytree.tree_flatten(fx.map_arg((one.args, one.kwargs), twin.__getitem__))
        for one, twin in zip(column, twins, strict=True)
    ]
    try:
        if any(spec != flat[0][1] for _, spec in flat):
            raise ValueError("other operands at another size")
        merged = [
            leaves[0] if all(leaf is leaves[0] for leaf in leaves) else sizes.of(leaves)
            for leaves in zip(*(leaves for leaves, _ in flat), strict=True)
        ]
    except ValueError as error:
        raise LowerError(f"{where(node)} cannot vary in size: {error}") from None
    if merged != flat[0][0]:
        node.meta[VARIED] = pytree.tree_unflatten(merged, flat[0][1])
