"""What a node does to the elements of its operand (reshape, permute, widen, scale), and which number an argument is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from memopt.program import InputKind, Program

aten = torch.ops.aten

METADATA_CHECKS = frozenset({aten._assert_tensor_metadata.default})
"""They read no values, and what they check was true when the program was captured."""

_RESHAPES = frozenset({
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.clone.default, aten.alias.default,
    aten.detach.default,
})  # fmt: skip
PERMUTES = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})
MULTIPLIES = frozenset({aten.mul.Tensor, aten.mul.Scalar})
DIVIDES = frozenset({aten.div.Tensor, aten.div.Scalar})
_SCALARS = frozenset({aten.full.default, aten.scalar_tensor.default})
_SCALAR_COPIES = frozenset({
    aten.lift_fresh_copy.default, aten.clone.default, aten.alias.default, aten.detach.default
})  # fmt: skip


def shape(node: Any) -> tuple[int, ...]:
    """The sizes of a node's one tensor."""
    return tuple(node.meta["val"].shape)


def readers(node: fx.Node) -> list[fx.Node]:
    """The users that read the node's values."""
    return [user for user in node.users if user.target not in METADATA_CHECKS]


def drop_metadata_checks(nodes: Iterable[fx.Node]) -> None:
    """Erase the checks of nodes that are about to be replaced, which would keep them alive."""
    for node in nodes:
        for user in list(node.users):
            if user.target in METADATA_CHECKS:
                user.graph.erase_node(user)


def number_of(program: Program, argument: Any) -> float | None:
    """The number that an argument is: a literal, a filled tensor, or a scalar that the program owns."""
    if isinstance(argument, (int, float)):
        return float(argument)
    if not isinstance(argument, fx.Node):
        return None
    if argument.target in _SCALAR_COPIES:
        return number_of(program, argument.args[0])
    if argument.target in _SCALARS and isinstance(argument.args[-1], (int, float)):
        return float(argument.args[-1])
    if argument.op != "placeholder" or program.input_of(argument.name).kind is not InputKind.CONSTANT:
        return None
    value = program.state[argument.name]
    return float(value.item()) if value.ndim == 0 and value.dtype is not torch.bool else None


def keeps_order(node: fx.Node) -> bool:
    """Whether the node's elements in row-major order are those of its first operand."""
    if node.target in _RESHAPES:
        return True
    if node.target is aten.expand.default:
        return shape(node) == shape(node.args[0])
    moved = _moved(node)
    return moved is not None and moved == sorted(moved)


def permutation(node: fx.Node) -> list[int] | None:
    """Which dimension of its operand each dimension of a permuting node is; None when the node permutes nothing."""
    if node.target not in PERMUTES:
        return None
    rank = len(shape(node))
    if node.target is aten.permute.default:
        return [int(dim) % rank for dim in node.args[1]]  # type: ignore[union-attr,arg-type]
    dims = list(range(rank))
    if rank > 1:
        i, j = (0, 1) if node.target is aten.t.default else (node.args[1], node.args[2])
        dims[i], dims[j] = dims[j], dims[i]  # type: ignore[index]
    return dims


def _moved(node: fx.Node) -> list[int] | None:
    """The permutation without dimensions of size 1, which move freely."""
    dims = permutation(node)
    return None if dims is None else [dim for dim in dims if shape(node.args[0])[dim] != 1]


def swaps(node: fx.Node, rows: int, columns: int) -> bool:
    """Whether the node transposes the matrices of these sizes that its operand holds."""
    moved = _moved(node)
    if moved is None or len(moved) < 2:
        return False
    straight = sorted(moved)
    sizes = [shape(node.args[0])[dim] for dim in straight[-2:]]
    return moved == [*straight[:-2], straight[-1], straight[-2]] and sizes == [rows, columns]


def widens(node: fx.Node) -> bool:
    """Whether the node is a cast that only adds precision."""
    if node.target is not aten._to_copy.default:
        return False
    old, new = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if old.device != new.device or not (old.is_floating_point() and new.is_floating_point()):
        return False
    return old.dtype == new.dtype or new.dtype is torch.float32


def factor_of(program: Program, node: fx.Node) -> float | None:
    """What the node multiplies its first operand with, if that is all it does."""
    if node.target not in MULTIPLIES | DIVIDES or node.kwargs:
        return None
    by = number_of(program, node.args[1])
    if by is None or not by or not math.isfinite(by) or not isinstance(node.args[0], fx.Node):
        return None
    return by if node.target in MULTIPLIES else 1 / by
