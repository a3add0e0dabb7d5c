"""Normalisations written by hand: which expression of means, squares and roots is a LayerNorm or an RMSNorm."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from memopt.graph.rewrite import Refused
from memopt.patterns.elements import keeps_order, number_of, readers, shape
from memopt.program import Program

aten = torch.ops.aten

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_ADDS = frozenset({aten.add.Tensor, aten.add.Scalar})


@dataclasses.dataclass(frozen=True)
class Norm:
    """(x - mean) / sqrt(variance + eps) or x / sqrt(mean of squares + eps), then times a weight, plus a bias.

    Attributes:
        centred: whether the mean is subtracted: LayerNorm, else RMSNorm.
        x: what is normalised, in the dtype of the result.
        sizes: the normalised trailing dimensions.
        weight, bias: tensors that broadcast like one of shape `sizes`; None where there is none.
        result: the node whose value it all is.
        nodes: the operations that it replaces, `result` included.
    """

    centred: bool
    x: fx.Node
    sizes: tuple[int, ...]
    eps: float
    weight: fx.Node | None
    bias: fx.Node | None
    result: fx.Node
    nodes: tuple[fx.Node, ...]


def norm_of(program: Program, node: fx.Node) -> Norm | None:
    """The normalisation whose quotient this node is, with what follows of it; None when it is none.

    Raises:
        Refused: it is a normalisation, but of dimensions that are not the last, by the unbiased variance, with eps
            outside the root, or its statistics are read elsewhere.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in _FLOATS:
        return None
    for scaled, root in _quotients(node):
        core = _core(program, scaled, root)
        if core is not None:
            return _with_affine(core, node)
    return None


@dataclasses.dataclass(frozen=True)
class _Core:
    centred: bool
    x: fx.Node
    sizes: tuple[int, ...]
    eps: float
    nodes: tuple[fx.Node, ...]


# -- the quotient --------------------------------------------------------------------------------------------------


def _quotients(node: fx.Node) -> list[tuple[fx.Node, list[fx.Node]]]:
    """What the node divides, and the nodes from the root's operand to the divisor, that operand first."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or node.kwargs or len(node.all_input_nodes) != 2:
        return []
    left, right = node.args
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return []
    if node.target is aten.div.Tensor:
        roots = [(left, _root(right, 0.5))]
    else:
        roots = [(left, _root(right, -0.5)), (right, _root(left, -0.5))]
    return [(scaled, root) for scaled, root in roots if root is not None]


def _root(node: fx.Node, exponent: float) -> list[fx.Node] | None:
    """The chain from v to v ** exponent, v first."""
    if keeps_order(node) and node.op == "call_function":
        inner = _root(node.args[0], exponent)  # type: ignore[arg-type]
        return None if inner is None else [*inner, node]
    if node.target is aten.reciprocal.default:
        inner = _root(node.args[0], -exponent)  # type: ignore[arg-type]
        return None if inner is None else [*inner, node]
    direct: Any = {aten.sqrt.default: 0.5, aten.rsqrt.default: -0.5}.get(node.target)  # type: ignore[call-overload]
    if node.target is aten.pow.Tensor_Scalar:
        direct = node.args[1]
    if direct == exponent:
        return [node.args[0], node]  # type: ignore[list-item]
    if node.target is aten.std.correction:
        return [node]
    if node.target in _ADDS and exponent == 0.5 and isinstance(node.args[1], (int, float)):
        inner = _root(node.args[0], exponent)  # type: ignore[arg-type]
        return None if inner is None else [*inner, node]
    return None


def _core(program: Program, scaled: fx.Node, root: list[fx.Node]) -> _Core | None:
    inside, *chain = root
    nodes = list(chain)
    eps = None
    while inside.op == "call_function" and (keeps_order(inside) or inside.target in _ADDS):
        nodes.append(inside)
        if inside.target in _ADDS:
            number = number_of(program, inside.args[1])
            if number is None or eps is not None or inside.kwargs:
                return None
            eps = number
        inside = inside.args[0]  # type: ignore[assignment]
    nodes.append(inside)
    found = _moment(inside, scaled)
    if found is None:
        return None
    x, dims, more, correction = found
    centred = more is not None
    nodes += more or ()
    kind = "LayerNorm" if centred else "RMSNorm"
    if inside.target is aten.std.correction or any(node.target in _ADDS for node in chain):
        raise Refused(f"{kind} by hand, but eps is not added to the variance, under the root")
    if correction:
        raise Refused(f"{kind} by hand, but of the unbiased variance")
    rank = len(shape(x))
    if dims != tuple(range(rank - len(dims), rank)):
        raise Refused(f"{kind} by hand, but over dimensions {list(dims)} of {rank}, not the last ones")
    if eps is None or not eps > 0 or not math.isfinite(eps):
        raise Refused(f"{kind} by hand, but without a positive eps under the root")
    if shape(root[-1]) != (*shape(x)[: dims[0]], *(1 for _ in dims)):
        return None
    if not centred and inside.target is aten.mean.dim:
        nodes.append(inside.args[0])  # type: ignore[arg-type]
    return _Core(centred, x, shape(x)[dims[0] :], eps, tuple(dict.fromkeys(nodes)))


_Moment = tuple[fx.Node, tuple[int, ...], "list[fx.Node] | None", float]


def _moment(node: fx.Node, scaled: fx.Node) -> _Moment | None:
    """What a second moment is of, over which dimensions, the nodes that centre it (None: it is not), its correction."""
    if node.target in (aten.var.correction, aten.std.correction):
        x: Any = node.args[0]
        centre = _centring(scaled)
        if centre is None or centre[0] is not x or centre[1] != _dims(node):
            return None
        correction = node.kwargs.get("correction", 1)
        return x, centre[1], centre[2], 1.0 if correction is None else float(correction)  # type: ignore[arg-type]
    if node.target is not aten.mean.dim:
        return None
    squared: Any = node.args[0]
    power = squared.target is aten.pow.Tensor_Scalar and squared.args[1] == 2
    product = squared.target is aten.mul.Tensor and squared.args[0] is squared.args[1]
    if not power and not product:
        return None
    x = squared.args[0]
    dims = _dims(node)
    centre = _centring(x)
    if centre is not None and x is scaled and centre[1] == dims:
        return centre[0], dims, [*centre[2], squared], 0.0
    if x is scaled or (_is_widening(x) and x.args[0] is scaled):
        return x, dims, None, 0.0
    return None


def _centring(node: fx.Node) -> tuple[fx.Node, tuple[int, ...], list[fx.Node]] | None:
    """x, the dimensions and the nodes, when the node is x minus its own mean."""
    if node.target is not aten.sub.Tensor or node.kwargs or not isinstance(node.args[1], fx.Node):
        return None
    x: Any = node.args[0]
    nodes, mean = [node], node.args[1]
    while keeps_order(mean) and mean.op == "call_function":
        nodes.append(mean)
        mean = mean.args[0]  # type: ignore[assignment]
    if mean.target is not aten.mean.dim or mean.args[0] is not x or not isinstance(x, fx.Node):
        return None
    dims = _dims(mean)
    kept = tuple(1 if dim in dims else size for dim, size in enumerate(shape(x)))
    return (x, dims, [*nodes, mean]) if shape(node.args[1]) == kept else None


def _dims(node: fx.Node) -> tuple[int, ...]:
    rank = len(shape(node.args[0]))
    dims = node.args[1] if len(node.args) > 1 else None
    return tuple(sorted(dim % rank for dim in dims)) if dims else tuple(range(rank))  # type: ignore[union-attr,operator,misc]


def _is_widening(node: fx.Node) -> bool:
    if node.target is not aten._to_copy.default:
        return False
    old, new = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return old.dtype in (torch.float16, torch.bfloat16) and new.dtype is torch.float32 and old.device == new.device


# -- what follows --------------------------------------------------------------------------------------------------


def _with_affine(core: _Core, quotient: fx.Node) -> Norm:
    """Take in a cast back, a weight and a bias. Raises Refused when something else reads what the norm is made of."""
    x, result = core.x, quotient
    nodes = [*core.nodes, quotient]
    for node in core.nodes:
        others = [user for user in readers(node) if user not in nodes]
        if others:
            raise Refused(f"a norm by hand, but {node.name}, which it is made of, is read by {others[0].name} too")
    after = _only_reader(result)
    if _is_widening(x) and after is not None and after.target is aten._to_copy.default:
        narrow: Any = x.args[0]
        if (
            after.meta["val"].dtype == narrow.meta["val"].dtype
            and after.meta["val"].device == narrow.meta["val"].device
        ):
            x, result = narrow, after
            nodes.append(after)
            after = _only_reader(result)
    weight = bias = None
    if after is not None and after.target is aten.mul.Tensor:
        weight = _parameter(after, result, core.sizes)
        if weight is not None:
            result = after
            nodes.append(after)
            after = _only_reader(result)
    if core.centred and after is not None and after.target is aten.add.Tensor and not after.kwargs:
        bias = _parameter(after, result, core.sizes)
        if bias is not None:
            result = after
            nodes.append(after)
    return Norm(core.centred, x, core.sizes, core.eps, weight, bias, result, tuple(nodes))


def _only_reader(node: fx.Node) -> fx.Node | None:
    (first, *others) = [*readers(node), None]
    return first if first is not None and others == [None] and first.op == "call_function" else None


def _parameter(node: fx.Node, of: fx.Node, sizes: tuple[int, ...]) -> fx.Node | None:
    """The other operand of a sum or product, when it is a tensor of the normalised sizes and the result's dtype."""
    operands = [arg for arg in node.args if arg is not of]
    if len(operands) != 1 or not isinstance(operands[0], fx.Node):
        return None
    other, value = operands[0].meta["val"], of.meta["val"]
    fits = tuple(other.shape) == (1,) * (other.ndim - len(sizes)) + sizes and other.ndim <= value.ndim
    return operands[0] if fits and (other.dtype, other.device) == (value.dtype, value.device) else None
