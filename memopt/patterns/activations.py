"""Activations spelled out by hand: which expression of elementary operations is which ATen activation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from memopt.graph.rewrite import Refused
from memopt.patterns.clamps import bounds_of
from memopt.program import InputKind, Program
from memopt.torch_compat.operators import schema_of

aten = torch.ops.aten

Polynomial = dict[tuple[int, int], float]
"""Coefficients by (power of x, power of the anchor's value)."""

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_ARITHMETIC = {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.rsub.Scalar,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.neg.default,
    aten.pow.Tensor_Scalar,
    aten.reciprocal.default,
}
_CURVES = {
    aten.sigmoid.default,
    aten.tanh.default,
    aten.erf.default,
    aten.exp.default,
    aten.hardsigmoid.default,
}
_LARGEST_EXPRESSION = 16
_NEAR = 1e-2
_ROOT_HALF = math.sqrt(0.5)
_ROOT_2_OVER_PI = math.sqrt(2 / math.pi)


@dataclasses.dataclass(frozen=True)
class Spelling:
    """An expression that is `target(x, **kwargs)`; `nodes` are its operations, the last of them its result."""

    target: Any
    kwargs: dict[str, Any]
    x: fx.Node
    nodes: tuple[fx.Node, ...]


def spelling_of(program: Program, root: fx.Node) -> Spelling | None:
    """The activation that the expression ending in `root` spells out, or None.

    The expression is read as a polynomial in its operand x and in one curve (erf, tanh, sigmoid, exp or a clamp) of a
    polynomial in x, so that the order of factors, their association and where constants are multiplied do not matter.

    Raises:
        Refused: the expression has the form of an activation, but constants that are not its constants to the precision
            of the dtype, or an intermediate that something else reads.
    """
    value = root.meta.get("val")
    if root.target not in _ARITHMETIC and bounds_of(root) is None:
        return None
    if not isinstance(value, torch.Tensor) or value.dtype not in _FLOATS:
        return None
    for anchor in _expression(root):
        if anchor.target not in _CURVES and bounds_of(anchor) is None:
            continue
        for x in _operands(anchor):
            found = _match(program, root, anchor, x)
            if found is not None:
                return found
    return None


def _expression(root: fx.Node) -> Iterator[fx.Node]:
    """The nodes that `root` is computed from by arithmetic, nearest first, with those where arithmetic ends."""
    seen, work = {root}, [root]
    while work and len(seen) < _LARGEST_EXPRESSION:
        node = work.pop(0)
        yield node
        if node.target in _ARITHMETIC:
            fresh = [operand for operand in node.all_input_nodes if operand not in seen]
            seen.update(fresh)
            work.extend(fresh)
    yield from work


def _operands(anchor: fx.Node) -> Iterator[fx.Node]:
    """What may be the operand x of an activation whose curve is `anchor`."""
    (argument, *_) = anchor.all_input_nodes
    if argument.target is aten.softplus.default:
        yield argument.all_input_nodes[0]
    yield from _expression(argument)


def _match(program: Program, root: fx.Node, anchor: fx.Node, x: fx.Node) -> Spelling | None:
    for form in _FORMS:
        reader = _Reader(program, x, anchor)
        found = form(reader, root, anchor, anchor.all_input_nodes[0])
        if found is not None:
            target, kwargs, pairs = found
            break
    else:
        return None
    nodes = {*reader.nodes, anchor, root}
    shape, dtype = x.meta["val"].shape, x.meta["val"].dtype
    if any((node.meta["val"].shape, node.meta["val"].dtype) != (shape, dtype) for node in nodes):
        return None
    off = max((abs(have - want) / abs(want) for have, want in pairs), default=0.0)
    if off > _NEAR:
        return None
    name = schema_of(target).name.removeprefix("aten::")
    if off > min(1e-6, 4 * torch.finfo(dtype).eps):
        raise Refused(f"it has the form of {name}, but its constants are off by {off:.1e}, more than {dtype} rounds")
    for node in nodes - {root}:
        if any(user not in nodes for user in node.users):
            raise Refused(f"it spells out {name}, but {node.name} has other users")
    return Spelling(target, kwargs, x, tuple(node for node in root.graph.nodes if node in nodes))


class _Reader:
    """Reads nodes as polynomials in x and the anchor, and remembers which nodes it read."""

    def __init__(self, program: Program, x: fx.Node, anchor: fx.Node) -> None:
        self.x, self.anchor = x, anchor
        self.nodes: set[fx.Node] = set()
        self._program = program

    def polynomial(self, node: Any) -> Polynomial | None:
        """The node as a polynomial without zero coefficients; None when it is none of low degree."""
        found = self._read(node)
        return None if found is None else {power: value for power, value in found.items() if value != 0}

    def in_x(self, node: Any) -> dict[int, float] | None:
        """The node as a polynomial in x alone, by power."""
        found = self.polynomial(node)
        if found is None or any(power[1] for power in found):
            return None
        return {power[0]: value for power, value in found.items()}

    def _read(self, node: Any) -> Polynomial | None:
        if isinstance(node, (int, float)):
            return {(0, 0): float(node)} if math.isfinite(node) else None
        if node is self.x:
            return {(1, 0): 1.0}
        if node is self.anchor:
            return {(0, 1): 1.0}
        if not isinstance(node, fx.Node):
            return None
        if node.op == "placeholder":
            return self._constant(node)
        if node.target not in _ARITHMETIC or node.target is aten.reciprocal.default:
            return None
        if node.target is aten.div.Tensor and node.kwargs:
            return None
        read = [self._read(argument) for argument in node.args]
        self.nodes.add(node)
        return _combine(node, read[0], read[1] if len(read) > 1 else {})

    def _constant(self, node: fx.Node) -> Polynomial | None:
        """A scalar that the program owns, as torch.tensor(0.5) in a model's code."""
        value = self._program.state.get(node.name)
        if value is None or value.ndim or self._program.input_of(node.name).kind is not InputKind.CONSTANT:
            return None
        if type(value) is not torch.Tensor or value.is_meta or not value.dtype.is_floating_point:
            return None
        return {(0, 0): value.item()}


def _combine(node: fx.Node, left: Polynomial | None, right: Polynomial | None) -> Polynomial | None:
    if left is None or right is None:
        return None
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        factor = float(node.kwargs.get("alpha", 1)) * (1 if node.target is aten.add.Tensor else -1)  # type: ignore[arg-type]
        return {power: left.get(power, 0.0) + factor * right.get(power, 0.0) for power in {*left, *right}}
    if node.target is aten.rsub.Scalar and len(node.args) == 2:
        return {power: right.get(power, 0.0) - left.get(power, 0.0) for power in {*left, *right}}
    if node.target is aten.neg.default:
        return {power: -value for power, value in left.items()}
    if node.target is aten.div.Tensor:
        divisor = right.get((0, 0), 0.0)
        return {p: value / divisor for p, value in left.items()} if divisor and len(right) == 1 else None
    if node.target is aten.mul.Tensor:
        return _product(left, right)
    exponent = right.get((0, 0), 0.0)
    if exponent not in (1, 2, 3):
        return None
    result: Polynomial | None = left
    for _ in range(int(exponent) - 1):
        result = _product(result, left) if result is not None else None
    return result


def _product(left: Polynomial, right: Polynomial) -> Polynomial | None:
    result: Polynomial = {}
    for (a, b), value in left.items():
        for (c, d), other in right.items():
            result[a + c, b + d] = result.get((a + c, b + d), 0.0) + value * other
    return result if all(sum(power) <= 4 for power in result) else None


# -- the forms: each returns the activation, its keyword arguments, and pairs of constants (found, wanted) ---------

_Found = tuple[Any, dict[str, Any], list[tuple[float, float]]]
_Form = Callable[[_Reader, fx.Node, fx.Node, fx.Node], "_Found | None"]


def _gelu(reader: _Reader, root: fx.Node, anchor: fx.Node, argument: fx.Node) -> _Found | None:
    """x/2 + x/2 · erf(x / √2), and x/2 + x/2 · tanh(√(2/π) · (x + 0.044715 x³))."""
    if anchor.target is aten.erf.default:
        wanted, kwargs = {1: _ROOT_HALF}, {}
    elif anchor.target is aten.tanh.default:
        wanted, kwargs = {1: _ROOT_2_OVER_PI, 3: 0.044715 * _ROOT_2_OVER_PI}, {"approximate": "tanh"}
    else:
        return None
    inner, outer = reader.in_x(argument), reader.polynomial(root)
    if inner is None or outer is None or inner.keys() != wanted.keys() or outer.keys() != {(1, 0), (1, 1)}:
        return None
    sign = math.copysign(1.0, inner[1])  # erf and tanh are odd
    pairs = [(sign * inner[power], wanted[power]) for power in inner]
    pairs += [(outer[1, 0], 0.5), (sign * outer[1, 1], 0.5)]
    return aten.gelu.default, kwargs, pairs


def _silu(reader: _Reader, root: fx.Node, anchor: fx.Node, argument: fx.Node) -> _Found | None:
    """SiLU: x · sigmoid(x). With another factor within the sigmoid it is an approximation of GELU that ATen lacks."""
    if anchor.target is not aten.sigmoid.default:
        return None
    outer = reader.polynomial(root)
    if outer is None or outer.keys() != {(1, 1)}:
        return None
    if argument is reader.x:
        return aten.silu.default, {}, [(outer[1, 1], 1.0)]
    inner = reader.in_x(argument)
    if inner is not None and inner.keys() == {1}:
        raise Refused(f"it is x * sigmoid({inner[1]:g} x), which is neither silu nor gelu")
    return None


def _logistic(reader: _Reader, root: fx.Node, anchor: fx.Node, argument: fx.Node) -> _Found | None:
    """sigmoid(x) as 1 / (1 + exp(-x)), and silu(x) as x / (1 + exp(-x))."""
    if anchor.target is not aten.exp.default or reader.in_x(argument) != {1: -1.0}:
        return None
    if root.target is aten.reciprocal.default:
        return (aten.sigmoid.default, {}, []) if _is_one_plus_anchor(reader, root.args[0]) else None
    if root.target is aten.div.Tensor and root.args[0] is reader.x and not root.kwargs:
        return (aten.silu.default, {}, []) if _is_one_plus_anchor(reader, root.args[1]) else None
    return None


def _is_one_plus_anchor(reader: _Reader, node: Any) -> bool:
    return reader.polynomial(node) == {(0, 0): 1.0, (0, 1): 1.0}


def _hard(reader: _Reader, root: fx.Node, anchor: fx.Node, argument: fx.Node) -> _Found | None:
    """clamp(x/6 + 1/2, 0, 1), and x times that, with the constants distributed in any way."""
    outer = reader.polynomial(root)
    if outer is None or outer.keys() not in ({(0, 1)}, {(1, 1)}):
        return None
    (factor,) = outer.values()
    target = aten.hardswish.default if (1, 1) in outer else aten.hardsigmoid.default
    if anchor.target is aten.hardsigmoid.default:
        hardswish = target is aten.hardswish.default and argument is reader.x
        return (target, {}, [(factor, 1.0)]) if hardswish else None
    bounds, inner = bounds_of(anchor), reader.in_x(argument)
    if bounds is None or inner is None or inner.keys() != {0, 1} or bounds.low != 0 or factor < 0:
        return None
    return target, {}, [(factor * inner[1], 1 / 6), (factor * inner[0], 0.5), (factor * bounds.high, 1.0)]


def _mish(reader: _Reader, root: fx.Node, anchor: fx.Node, argument: fx.Node) -> _Found | None:
    """Mish: x · tanh(softplus(x))."""
    if anchor.target is not aten.tanh.default or argument.target is not aten.softplus.default:
        return None
    if argument.args != (reader.x,) or argument.kwargs:
        return None
    outer = reader.polynomial(root)
    reader.nodes.add(argument)
    return (aten.mish.default, {}, [(outer[1, 1], 1.0)]) if outer is not None and outer.keys() == {(1, 1)} else None


_FORMS: tuple[_Form, ...] = (_gelu, _silu, _logistic, _hard, _mish)
