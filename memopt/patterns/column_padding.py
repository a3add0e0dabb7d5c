"""Matrices whose columns are padded for the sake of fast products, and cut off again, as Inductor writes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memopt.program import Program
from memopt.rewrite import erase_unused, fake_value

aten = torch.ops.aten
TRANSPOSES = {aten.t.default: (), aten.permute.default: ([1, 0],), aten.transpose.int: (0, 1)}
_PAD, _SLICE = aten.constant_pad_nd.default, aten.slice.Tensor


def turns(node: Any) -> bool:
    """Whether the node is a transposed matrix."""
    return isinstance(node, fx.Node) and node.target in TRANSPOSES and node.args[1:] == TRANSPOSES[node.target]


def cuts_columns(node: fx.Node) -> bool:
    """Whether the node is the leading columns of its operand."""
    if node.target is not _SLICE:
        return False
    given: list[Any] = list(node.args[1:])
    dim, start, _, step = given + [0, None, None, 1][len(given) :]
    last: int = node.meta["val"].ndim - 1
    return dim in (last, -1) and start in (0, None) and step == 1


def pads_columns(node: fx.Node) -> bool:
    """Whether the node is its operand with further columns of one number each."""
    return node.target is _PAD and not any(pads_of(node)[2:])


def pads_of(node: fx.Node) -> list[int]:
    """The sizes of a padding: before and after the last dimension, then those of the one before it, and so on."""
    return list(node.args[1])  # type: ignore[arg-type]


def turn_after_padding(program: Program) -> None:
    """Edit the program's graph: a transposed matrix whose rows are padded becomes a padded one that is transposed.

    Padding the rows of Xᵀ gives the transpose of X with padded columns, so that X is padded once for all its readers.
    """
    graph = program.graph
    for node in list(graph.nodes):
        source = node.args[0] if node.target is _PAD else None
        if not turns(source) or len(pads_of(node)) != 4 or any(pads_of(node)[:3]):
            continue
        matrix: Any = source.args[0]  # type: ignore[union-attr]
        pads, value = [0, pads_of(node)[3]], node.args[2:]
        alike = [user for user in matrix.users if _pads_alike(user, node, pads, value)]
        with graph.inserting_before(source):
            padded = _made(program, node, _PAD, (matrix, pads, *value))
            turned = _made(program, node, source.target, (padded, *source.args[1:]))  # type: ignore[union-attr]
        node.replace_all_uses_with(turned)
        for other in alike:
            if _before(graph, padded, other):
                other.replace_all_uses_with(padded)
        erase_unused(graph, [node, *alike])


def _pads_alike(user: fx.Node, node: fx.Node, pads: list[Any], value: tuple[Any, ...]) -> bool:
    if user.target is not _PAD or user.args[2:] != value or not pads_columns(user):
        return False
    return pads_of(user)[:2] == pads and user.meta.get("phase") is node.meta.get("phase")


def _before(graph: fx.Graph, first: fx.Node, second: fx.Node) -> bool:
    return next(node for node in graph.nodes if node in (first, second)) is first


def _made(program: Program, node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    made = program.graph.call_function(target, args)
    made.meta = {key: item for key, item in node.meta.items() if key not in ("val", "inplace")}
    made.meta["val"] = fake_value(program, target, args)
    return made
