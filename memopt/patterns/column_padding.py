"""Matrices whose columns are padded for the sake of fast products, and cut off again, as Inductor writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from memopt.graph.rewrite import erase_unused, fake_value
from memopt.program import Program

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
            padded = made_like(program, node, _PAD, (matrix, pads, *value))
            turned = made_like(program, node, source.target, (padded, *source.args[1:]))  # type: ignore[union-attr]
        node.replace_all_uses_with(turned)
        for other in alike:
            if _before(graph, padded, other):
                other.replace_all_uses_with(padded)
        erase_unused(graph, [node, *alike])


class Aligned:
    """Gives matrices of a program that is being edited aligned rows, by columns of zeros, each matrix once."""

    def __init__(self, program: Program, multiple: int) -> None:
        """Pad columns to a multiple of `multiple`."""
        self._program, self._multiple = program, multiple
        self._padded: dict[tuple[fx.Node, int, int], fx.Node] = {}

    def product(self, node: fx.Node) -> fx.Node:
        """Pad the columns of a product [rows, columns] of rows and a matrix, and cut them off again; return it."""
        *bias, left, right = node.args
        columns = int(node.meta["val"].shape[1])
        if columns % self._multiple == 0:
            return node
        with self._program.graph.inserting_before(node):
            operands = [self._pad(node, operand, columns=-columns % self._multiple) for operand in (*bias, right)]
            made = self._made(node, node.target, (*operands[:-1], left, operands[-1]))
            self._cut(node, made, 1, columns)
        return made

    def inner(self, node: fx.Node) -> None:
        """Pad what a product of two matrices sums over: the columns of the left one, the rows of the right one."""
        left, right = node.args[-2:]
        size = -int(left.meta["val"].shape[1]) % self._multiple  # type: ignore[union-attr]
        if size:
            with self._program.graph.inserting_before(node):
                operands = (self._pad(node, left, columns=size), self._pad(node, right, rows=size))
                made = self._made(node, node.target, (*node.args[:-2], *operands))
            self._replace(node, made)

    def turned(self, node: fx.Node) -> None:
        """Pad the columns of the matrix that a product reads transposed on its left, and cut rows off its result."""
        left, right = node.args
        rows = int(node.meta["val"].shape[0])
        if rows % self._multiple:
            with self._program.graph.inserting_before(node):
                wide = self._pad(node, left, rows=-rows % self._multiple)
                self._cut(node, self._made(node, node.target, (wide, right)), 0, rows)

    def _pad(self, node: fx.Node, matrix: Any, *, columns: int = 0, rows: int = 0) -> fx.Node:
        """The matrix (or vector) with more columns, or rows, for a product and for those that come after it."""
        if turns(matrix):
            padded = self._pad(node, matrix.args[0], columns=rows, rows=columns)
            return self._made(node, matrix.target, (padded, *matrix.args[1:]))
        key = matrix, columns, rows
        if key not in self._padded:
            pads = [0, columns] + [0, rows] * bool(rows)
            self._padded[key] = self._made(node, _PAD, (matrix, pads, 0.0))
        return self._padded[key]

    def _made(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
        return made_like(self._program, node, target, args)

    def _cut(self, node: fx.Node, made: fx.Node, dim: int, size: int) -> None:
        self._replace(node, self._made(node, _SLICE, (made, dim, 0, size)))

    def _replace(self, node: fx.Node, made: fx.Node) -> None:
        node.replace_all_uses_with(made)
        erase_unused(self._program.graph, [node])


def _pads_alike(user: fx.Node, node: fx.Node, pads: list[Any], value: tuple[Any, ...]) -> bool:
    if user.target is not _PAD or user.args[2:] != value or not pads_columns(user):
        return False
    return pads_of(user)[:2] == pads and user.meta.get("phase") is node.meta.get("phase")


def _before(graph: fx.Graph, first: fx.Node, second: fx.Node) -> bool:
    return next(node for node in graph.nodes if node in (first, second)) is first


def made_like(
    program: Program, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> fx.Node:
    """A new call where the graph is being edited, in the phase and with the source line of a node."""
    made = program.graph.call_function(target, args, dict(kwargs or {}))
    made.meta = {key: item for key, item in node.meta.items() if key not in ("val", "inplace")}
    made.meta["val"] = fake_value(program, target, args, kwargs)
    return made
