"""Attention written by hand: which product, softmax and product of a graph are one scaled-dot-product attention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from memopt.graph.rewrite import Refused
from memopt.patterns.elements import (
    DIVIDES,
    MULTIPLIES,
    PERMUTES,
    factor_of,
    keeps_order,
    number_of,
    readers,
    shape,
    swaps,
    widens,
)
from memopt.program import Program, is_random
from memopt.torch_compat.operators import OpOverload

aten = torch.ops.aten

PRODUCTS = frozenset({aten.bmm.default, aten.baddbmm.default, aten.mm.default})
# How many operations are searched for what stands between a softmax and its products.
_FAR = 24


@dataclasses.dataclass(frozen=True)
class Operand:
    """A node from which an operand of a product, a stack of matrices, can be read.

    Attributes:
        node: its elements in row-major order are those of the matrices, one matrix after the other.
        transposed: whether they are those of the transposed matrices.
        scale: what the node's elements are multiplied with to get the operand's.
    """

    node: fx.Node
    transposed: bool
    scale: float


@dataclasses.dataclass(frozen=True)
class Scaled:
    """The scores so far are multiplied by a number."""

    by: float


@dataclasses.dataclass(frozen=True)
class Added:
    """A tensor times a number is added to the scores, which have the given shape."""

    addend: fx.Node
    by: float
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Hidden:
    """The scores, of the given shape, are replaced by a number where the condition has the value `where`."""

    condition: fx.Node
    where: bool
    number: float
    shape: tuple[int, ...]


Step = Scaled | Added | Hidden


@dataclasses.dataclass(frozen=True)
class Attention:
    """softmax(steps(Q Kᵀ)) V.

    Attributes:
        softmax: its node.
        second: the product with V.
        steps: what happens to the scores before the softmax, in order.
        lead: batch and heads, whose product is the number of matrices in each operand.
        lengths: queries and keys, then the widths of a key and of a value.
        query, key, value: where each can be read, the product's own operand first, each next one computed before it.
        results: `second`, then the nodes with its elements in the same order, each the only reader of the one before.
        nodes: the operations from the first product to the second, both included.
    """

    softmax: fx.Node
    second: fx.Node
    steps: tuple[Step, ...]
    lead: tuple[int, int]
    lengths: tuple[int, int, int, int]
    query: tuple[Operand, ...]
    key: tuple[Operand, ...]
    value: tuple[Operand, ...]
    results: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what comes out of it."""
        return self.second.meta["val"].dtype  # type: ignore[no-any-return]


def attention_of(program: Program, softmax: fx.Node) -> Attention | None:
    """The attention whose softmax this is; None when it is none.

    Raises:
        Refused: it has the form of an attention, but something else happens to its scores or probabilities, or reads
            them.
    """
    rank = len(shape(softmax))
    if softmax.args[1] not in (-1, rank - 1) or rank < 2:
        return None
    second, after = _second(softmax)
    found = _scores(program, softmax.args[0])
    if found is None or second is None:
        _refuse_what_lies_between(softmax, up=found is None, down=second is None)
        return None
    first, steps, before = found
    left, right = factors(first)
    probabilities, values = factors(second)
    if shape(first)[-2:] != shape(softmax)[-2:] or shape(probabilities) != shape(first):
        return None
    for node in (*before, softmax, *after):
        others = [user for user in readers(node) if user not in (*before, softmax, *after, second)]
        if others:
            what = "its probabilities are" if node in (softmax, *after) else f"{node.name}, its scores, is"
            raise Refused(f"{what} read by {others[0].name} too")
    queries, keys = shape(first)[-2:]
    width, wide = shape(left)[-1], shape(values)[-1]
    query = tuple(_operands(program, left, queries, width, transposed=False))
    key = tuple(_operands(program, right, keys, width, transposed=True))
    value = tuple(_operands(program, values, keys, wide, transposed=False))
    shapes = [shape(softmax), *(step.shape for step in steps if not isinstance(step, Scaled))]
    shapes += [shape(operand.node) for operand in query if shape(operand.node)[-2:] == (queries, width)]
    lead = _lead(math.prod(shape(first)[:-2]), shapes)
    return Attention(
        softmax, second, steps, lead, (queries, keys, width, wide), query, key, value,
        tuple(_results(second)), (*before, softmax, *after, second),
    )  # fmt: skip


def factors(product: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The two matrices, or stacks of them, that a product multiplies."""
    left, right = product.args[-2:]
    return left, right  # type: ignore[return-value]


# -- towards the first product ------------------------------------------------------------------------------------

_Scores = tuple[fx.Node, tuple[Step, ...], tuple[fx.Node, ...]]


def _scores(program: Program, node: Any, depth: int = 0) -> _Scores | None:
    """The product whose scores the node holds, the steps in between, and the nodes from the one to the other."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or depth > _FAR:
        return None
    if node.target in PRODUCTS:
        return node, _of_product(node), (node,)
    for source, step in _steps(program, node):
        found = _scores(program, source, depth + 1)
        if found is not None:
            first, steps, nodes = found
            return first, (*steps, *step), (*nodes, node)
    return None


def _of_product(node: fx.Node) -> tuple[Step, ...]:
    if node.target is not aten.baddbmm.default:
        return ()
    scale, by = (float(node.kwargs.get(name, 1)) for name in ("alpha", "beta"))  # type: ignore[arg-type]
    return Scaled(scale), Added(node.args[0], by, shape(node))  # type: ignore[arg-type]


def _steps(program: Program, node: fx.Node) -> Iterator[tuple[Any, tuple[Step, ...]]]:
    """What the node may do to which of its operands, if that is the scores."""
    args, sizes = node.args, shape(node)
    if keeps_order(node) or widens(node):
        yield args[0], ()
    factor = factor_of(program, node)
    if factor is not None:
        yield args[0], (Scaled(factor),)
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and all(isinstance(arg, fx.Node) for arg in args):
        by = float(node.kwargs.get("alpha", 1)) * (1 if node.target is aten.add.Tensor else -1)  # type: ignore[arg-type]
        if shape(args[0]) == sizes:
            yield args[0], (Added(args[1], by, sizes),)  # type: ignore[arg-type]
        if shape(args[1]) == sizes:
            yield args[1], (Scaled(by), Added(args[0], 1.0, sizes))  # type: ignore[arg-type]
    if node.target is aten.where.self:
        for scores, other, where in ((args[1], args[2], False), (args[2], args[1], True)):
            fill = number_of(program, other)
            if fill is not None and shape(scores) == sizes:
                yield scores, (Hidden(args[0], where, fill, sizes),)  # type: ignore[arg-type]
    if node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        fill = number_of(program, args[2])
        if fill is not None and shape(args[0]) == sizes:
            yield args[0], (Hidden(args[1], True, fill, sizes),)  # type: ignore[arg-type]


# -- towards the second product ------------------------------------------------------------------------------------


def _second(softmax: fx.Node) -> tuple[fx.Node | None, tuple[fx.Node, ...]]:
    """The product that reads the probabilities as its left operand, and the nodes in between."""
    node: fx.Node = softmax
    between: list[fx.Node] = []
    while True:
        ahead = [user for user in node.users if user.target in PRODUCTS and factors(user)[0] is node]
        if ahead:
            return ahead[0], tuple(between)
        passed = [user for user in node.users if keeps_order(user) or _is_cast(user)]
        if not passed:
            return None, ()
        node = passed[0]
        between.append(node)


def _is_cast(node: fx.Node) -> bool:
    if node.target is not aten._to_copy.default:
        return False
    old, new = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return bool(old.device == new.device and new.is_floating_point())


def _results(second: fx.Node) -> Iterator[fx.Node]:
    node = second
    while True:
        yield node
        users = list(node.users)
        if len(users) != 1 or not keeps_order(users[0]) or users[0].target is aten.clone.default:
            return
        node = users[0]


# -- operands --------------------------------------------------------------------------------------------------------


def _operands(program: Program, node: fx.Node, rows: int, columns: int, *, transposed: bool) -> Iterator[Operand]:
    scale = 1.0
    while True:
        yield Operand(node, transposed, scale)
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            return
        factor = factor_of(program, node)
        if factor is not None:
            scale *= factor
        elif swaps(node, *((rows, columns) if transposed else (columns, rows))):
            transposed = not transposed
        elif not keeps_order(node) and not widens(node):
            return
        node = node.args[0]  # type: ignore[assignment]


def _lead(count: int, shapes: list[tuple[int, ...]]) -> tuple[int, int]:
    """Batch and heads of `count` matrices, as one of the shapes has them."""
    leads = [sizes[:-2] for sizes in shapes if math.prod(sizes[:-2]) == count]
    for lead in leads:
        if len(lead) == 2:
            return lead[0], lead[1]
    for lead in leads:
        if len(lead) > 2:
            return count // lead[-1], lead[-1]
    return count, 1


# -- refusals --------------------------------------------------------------------------------------------------------


def _refuse_what_lies_between(softmax: fx.Node, *, up: bool, down: bool) -> None:
    """Raise Refused when products lie on both sides of the softmax, behind operations that no attention has."""
    above = _search(softmax, up=True) if up else (True, [])
    below = _search(softmax, up=False) if down else (True, [])
    if not above[0] or not below[0]:
        return
    for node in (*below[1], *above[1]):
        if is_random(node):
            raise Refused(f"dropout is active ({node.name})")
    for side, nodes in (("the first product and the softmax", above[1]), ("the softmax and the second", below[1])):
        if nodes:
            raise Refused(f"{nodes[0].name} ({nodes[0].target}) lies between {side}")


def _search(softmax: fx.Node, *, up: bool) -> tuple[bool, list[fx.Node]]:
    """Whether element-wise operations alone lead from the softmax to a product; those that no attention has."""
    seen: dict[fx.Node, None] = {}
    work, found = [softmax], False
    size = math.prod(shape(softmax))
    while work and len(seen) < _FAR:
        node = work.pop(0)
        for other in node.all_input_nodes if up else node.users:
            product = other.target in PRODUCTS and (up or factors(other)[0] is node)
            found = found or product
            if not product and other not in seen and _is_elementwise(other, size):
                seen[other] = None
                work.append(other)
    known = (aten.add.Tensor, aten.sub.Tensor, *MULTIPLIES, *DIVIDES, *PERMUTES) if up else ()
    return found, [n for n in seen if n.target not in known and not keeps_order(n) and not _is_cast(n)]


def _is_elementwise(node: fx.Node, size: int) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or (isinstance(value, torch.Tensor) and value.numel() != size):
        return False
    if not isinstance(node.target, OpOverload):
        return True  # an item of a multiple result
    return torch.Tag.pointwise in node.target.tags or is_random(node) or keeps_order(node) or _is_cast(node)
