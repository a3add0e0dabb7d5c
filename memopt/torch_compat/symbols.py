"""Sizes that are symbols while a graph is captured, and what they are in one call. Tried on torch 2.13."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree
from torch.utils._sympy import functions

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

# By symbol, as sympy has it.
Sizes = Mapping[Any, int]


class UnknownSizeError(RuntimeError):
    """A size depends on the values of tensors, or on a symbol that no input of the graph has."""


def is_symbolic(values: Iterable[Any]) -> bool:
    """Whether any of a graph's inputs is a symbol, or a tensor that has one among its sizes."""
    return any(
        isinstance(value, torch.SymInt)
        or (isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape))
        for value in values
    )


def symbols_of(inputs: Sequence[Any]) -> dict[int, Any]:
    """The symbols among a graph's inputs, by position; what is an expression of several is left out."""
    found = {place: value.node.expr for place, value in enumerate(inputs) if isinstance(value, torch.SymInt)}
    return {place: expression for place, expression in found.items() if getattr(expression, "is_symbol", False)}


def hints_of(inputs: Sequence[Any]) -> dict[Any, int]:
    """What the symbols among a graph's inputs were in the call that it was captured in.

    Raises:
        UnknownSizeError: one of them has no hint.
    """
    found = {}
    for place, symbol in symbols_of(inputs).items():
        hint = inputs[place].node.hint
        if hint is None:
            raise UnknownSizeError(f"{symbol} depends on the values of tensors")
        found[symbol] = int(hint)
    return found


def grows(value: Any) -> bool:
    """Whether a size becomes no smaller as its symbols become larger, as far as its form shows.

    Differences of symbols do not, and what is rounded or asked in other ways than by division is not looked into.
    """
    return not isinstance(value, SYMBOLIC) or _grows(value.node.expr)


def grows_everywhere(graph_module: torch.fx.GraphModule) -> bool:
    """Whether no tensor of a graph becomes smaller as symbols become larger; see `grows`."""
    leaves = [leaf for node in graph_module.graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val"))]
    return all(grows(size) for leaf in leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape)


def _grows(expression: Any) -> bool:
    if expression.is_number:
        return bool(expression >= 0)
    if expression.is_symbol:
        return True
    if expression.is_Add:
        return all(part.is_number or _grows(part) for part in expression.args)
    if expression.is_Mul or type(expression).__name__ in ("Max", "Min"):
        return all(map(_grows, expression.args))
    if expression.is_Pow or type(expression).__name__ in ("FloorDiv", "CeilDiv", "CleanDiv"):
        first, second = expression.args
        return _grows(first) and bool(second.is_number and second > 0)
    return False


class Sized:
    """Fake values with the sizes of one call in the place of symbols."""

    def __init__(self, sizes: Sizes) -> None:
        """Take what each symbol is."""
        self._sizes = dict(sizes)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __call__(self, value: Any) -> Any:
        """The value: tensors as fake ones of a mode of their own, symbols as numbers.

        Raises:
            UnknownSizeError: a symbol is not known.
        """
        return pytree.tree_map(self._leaf, value)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, SYMBOLIC):
            return self._number(value)
        if not isinstance(value, torch.Tensor):
            return value
        size, stride = [self._number(n) for n in value.shape], [self._number(n) for n in value.stride()]
        with self._mode:
            return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)

    def _number(self, value: Any) -> Any:
        if not isinstance(value, SYMBOLIC):
            return value
        found = value.node.expr.xreplace(self._sizes)
        if getattr(found, "free_symbols", None):
            raise UnknownSizeError(f"{found} depends on the values of tensors")
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
        return kind(found)


def surely(claim: Any) -> bool:
    """Whether a comparison of sizes holds whatever their symbols are, without a guard; or of plain sizes."""
    return bool(statically_known_true(claim))


def function_of_symbols(name: str) -> Any:
    """The function by which torch writes an expression of symbols, `FloorDiv` say; None for an unknown name."""
    return getattr(functions, name, None)
