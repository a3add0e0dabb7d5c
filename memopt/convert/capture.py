"""A model captured by torch.export with the axes that may vary, and the shapes to try it at."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.export import Dim, ExportedProgram

from memopt.common.quiet import quiet
from memopt.convert.errors import ConversionError
from memopt.errors import first_line
from memopt.torch_compat import pytree

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Axis:
    """One size that varies.

    Attributes:
        symbol: torch.export's name of it.
        label: its name in the ONNX file; axes of one label have one size.
        example: the size in the example inputs.
        low, high: the sizes that the captured graph is for; None: no limit.
    """

    symbol: str
    label: str
    example: int
    low: int
    high: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Captured:
    """A model as torch.export sees it.

    Attributes:
        exported: the captured graph.
        function: the model itself: `function(**inputs)` is what the numbers are compared with.
        inputs: the example inputs by name.
        shapes: the sizes of each tensor input, as numbers or as expressions in the axes' symbols.
        axes: the sizes that vary.
        notes: what could not be had, one line each.
    """

    exported: ExportedProgram
    function: Callable[..., Any]
    inputs: Mapping[str, Any]
    shapes: Mapping[str, tuple[int | sympy.Expr, ...]]
    axes: tuple[Axis, ...]
    notes: tuple[str, ...] = ()

    def shapes_at(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensor inputs where the axes (by symbol) have these sizes."""
        values = {sympy.Symbol(symbol, integer=True, positive=True): size for symbol, size in sizes.items()}
        by_name = {symbol.name: size for symbol, size in values.items()}

        def size_of(size: int | sympy.Expr) -> int:
            if isinstance(size, int):
                return size
            return int(size.subs({symbol: by_name[symbol.name] for symbol in size.free_symbols}))

        return {name: tuple(size_of(size) for size in shape) for name, shape in self.shapes.items()}

    def release(self) -> None:
        """Give up the memory of all weights: neither the model nor the exported program can be run afterwards."""
        held = [*self.exported.state_dict.values(), *self.exported.constants.values()]
        if isinstance(self.function, torch.nn.Module):
            held += [*self.function.parameters(), *self.function.buffers()]
        for value in held:
            if isinstance(value, torch.Tensor):
                value.data = value.data.new_empty(0)


def capture(
    model: torch.nn.Module,
    inputs: Mapping[str, Any],
    axes: Mapping[str, Mapping[int, str]],
    *,
    required: bool,
) -> Captured:
    """Capture `model(**inputs)` in its present mode, without gradients.

    Args:
        model: the module; it is not changed.
        inputs: keyword arguments; axes that vary need a size of two or more there.
        axes: input name → axis → label, for the axes that shall vary.
        required: whether an axis that cannot vary is an error; else it is fixed, and a note says so.

    Raises:
        ConversionError: torch.export cannot capture the model, or a required axis cannot vary.
    """
    dynamic = {name: dict.fromkeys(axes.get(name, {}), Dim.AUTO) or None for name in inputs}
    notes: list[str] = []
    try:
        exported = _export(model, inputs, dynamic if axes else None)
    except Exception as error:
        if not axes or required:
            raise ConversionError(f"torch.export cannot capture {type(model).__name__}: {first_line(error)}") from error
        notes.append(f"all shapes are fixed: with varying ones torch.export stops ({first_line(error)})")
        try:
            exported = _export(model, inputs, None)
        except Exception as again:
            raise ConversionError(f"torch.export cannot capture {type(model).__name__}: {first_line(again)}") from again
        axes = {}
    shapes = input_shapes(exported, inputs)
    fixed = [
        f"{label} ({name}, axis {axis}) is fixed at {shapes[name][axis]}: the model's own code needs that size"
        for name, places in axes.items()
        for axis, label in places.items()
        if isinstance(shapes[name][axis], int)
    ]
    if fixed and required:
        raise ConversionError(fixed[0])
    return Captured(exported, model, inputs, shapes, find_axes(exported, shapes, inputs, axes), (*notes, *fixed))


def from_exported(exported: ExportedProgram, labels: Mapping[str, Mapping[int, str]]) -> Captured:
    """Take a program that torch.export has captured before, with the sizes that vary there.

    Args:
        exported: the program, with example inputs.
        labels: input name → axis → label, for axes that have one.

    Raises:
        ConversionError: it has no example inputs, or others than tensors.
    """
    args, kwargs = exported.example_inputs or ((), {})
    leaves = pytree.tree_leaves((args, kwargs))
    names = [str(name) for name in exported.graph_signature.user_inputs]
    if not leaves or len(leaves) != len(names) or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise ConversionError("the exported program has no example inputs, or others than tensors: export it again")
    inputs = dict(zip(names, leaves, strict=True))
    structure = pytree.tree_structure((args, kwargs))
    module = exported.module()

    def call(**values: Any) -> Any:
        positions, keywords = pytree.tree_unflatten([values[name] for name in names], structure)
        return module(*positions, **keywords)

    shapes = input_shapes(exported, inputs)
    return Captured(exported, call, inputs, shapes, find_axes(exported, shapes, inputs, labels))


def _export(model: torch.nn.Module, inputs: Mapping[str, Any], dynamic: Any) -> ExportedProgram:
    with torch.no_grad(), quiet():
        return torch.export.export(model, (), dict(inputs), dynamic_shapes=dynamic, strict=False)


def input_shapes(exported: ExportedProgram, inputs: Mapping[str, Any]) -> dict[str, tuple[int | sympy.Expr, ...]]:
    """The sizes of each tensor input, read from the captured graph's placeholders."""
    users = exported.graph_signature.user_inputs
    values = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
    leaves = [name for name, value in inputs.items() for _ in pytree.tree_leaves(value)]
    found: dict[str, tuple[int | sympy.Expr, ...]] = {}
    for name, user in zip(leaves, users, strict=True):
        value = values.get(user) if isinstance(user, str) else None
        if isinstance(value, torch.Tensor) and isinstance(inputs[name], torch.Tensor):
            found[name] = tuple(_plain(size) for size in value.shape)
    return found


def _plain(size: int | torch.SymInt) -> int | sympy.Expr:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else expression


def find_axes(
    exported: ExportedProgram,
    shapes: Mapping[str, tuple[int | sympy.Expr, ...]],
    inputs: Mapping[str, Any],
    labels: Mapping[str, Mapping[int, str]],
) -> tuple[Axis, ...]:
    """One axis for each symbol in the inputs' shapes. Symbols that the model does not relate may share a label."""
    found: dict[str, Axis] = {}
    for name, shape in shapes.items():
        for place, size in enumerate(shape):
            if isinstance(size, int):
                continue
            for symbol in sorted(size.free_symbols, key=str):
                if symbol.name in found:
                    continue
                label = labels.get(name, {}).get(place, f"{name}_{place}")
                limits = exported.range_constraints[symbol]
                low, high = int(limits.lower), None if limits.upper > 2**48 else int(limits.upper)
                example = _solve(size, symbol, inputs[name].shape[place])
                found[symbol.name] = Axis(symbol.name, label, example, low, high)
    return tuple(found.values())


def _solve(size: sympy.Expr, symbol: sympy.Symbol, value: int) -> int:
    """What the symbol is where the expression has this value: sizes are linear in one symbol (8*s + 1)."""
    if size == symbol:
        return value
    step = int(size.subs({symbol: 3}) - size.subs({symbol: 2}))
    return 2 + (value - int(size.subs({symbol: 2}))) // step
