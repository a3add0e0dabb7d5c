"""Intervals: what a clamp, a relu or a chain of them does to a number, and which results need no clamp."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_IDEMPOTENT = {
    aten.abs.default,
    aten.ceil.default,
    aten.floor.default,
    aten.round.default,
    aten.sign.default,
    aten.trunc.default,
}
_RANGES = {
    aten.abs.default: (0.0, math.inf),
    aten.exp.default: (0.0, math.inf),
    aten.sigmoid.default: (0.0, 1.0),
    aten.hardsigmoid.default: (0.0, 1.0),
}


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The function min(max(x, low), high), NaN staying NaN; low ≤ high, infinite where there is no bound."""

    low: float
    high: float

    def __call__(self, x: float) -> float:
        """The function's value at a number."""
        return min(max(x, self.low), self.high)

    def then(self, after: Bounds) -> Bounds:
        """The one clamp that equals this one and then `after`, for every number.

        Both are monotone, and the second moves nothing but what leaves its interval, so the ends of the first interval
        say where everything goes.
        """
        return Bounds(after(self.low), after(self.high))

    def call(self, x: fx.Node) -> tuple[Any, tuple[Any, ...]]:
        """The operator and arguments that compute this function of `x`."""
        if (self.low, self.high) == (0, math.inf):
            return aten.relu.default, (x,)
        low = None if self.low == -math.inf else self.low
        high = None if self.high == math.inf else self.high
        return aten.clamp.default, (x, low, high)


def bounds_of(node: fx.Node) -> Bounds | None:
    """The function that a relu, clamp or hardtanh with constant bounds is; None for any other node.

    Crossed bounds (low > high) give high for every number, which is Bounds(high, high). Integer tensors and NaN bounds
    are left alone.
    """
    if node.target is aten.relu.default:
        low, high = 0.0, math.inf
    elif node.target is aten.hardtanh.default:
        low, high = _pair(node, ("min_val", "max_val"), (-1.0, 1.0))
    elif node.target is aten.clamp.default:
        low, high = _pair(node, ("min", "max"), (None, None))
    elif node.target is aten.clamp_min.default:
        low, high = _pair(node, ("min", ""), (None, None))
    elif node.target is aten.clamp_max.default:
        high, low = _pair(node, ("max", ""), (None, None))
    else:
        return None
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    value, operand = node.meta["val"], node.all_input_nodes[0].meta["val"]
    if value.dtype not in _FLOATS or value.dtype is not operand.dtype or len(node.all_input_nodes) > 1:
        return None
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)) or math.isnan(low) or math.isnan(high):
        return None
    return Bounds(min(low, high), high)


def changes_nothing(node: fx.Node) -> bool:
    """Whether the node gives back its operand, number for number: abs of abs, relu of a sigmoid, a wider clamp."""
    if not node.all_input_nodes:
        return False
    operand = node.all_input_nodes[0]
    if node.target in _IDEMPOTENT:
        return operand.target is node.target and operand.kwargs == node.kwargs
    bounds, inner = bounds_of(node), range_of(operand)
    return bounds is not None and inner is not None and inner.then(bounds) == inner


def range_of(node: fx.Node) -> Bounds | None:
    """An interval that holds every number the node can give, NaN aside; None when no narrower one is known."""
    if node.target in _RANGES and node.meta["val"].dtype in _FLOATS:
        return Bounds(*_RANGES[node.target])
    return bounds_of(node)


def _pair(node: fx.Node, names: tuple[str, str], defaults: tuple[Any, Any]) -> tuple[Any, Any]:
    given = [*node.args[1:], *(None,) * 2][:2]
    return tuple(  # type: ignore[return-value]
        value if value is not None else node.kwargs.get(name, default)
        for value, name, default in zip(given, names, defaults, strict=True)
    )
