"""Attention written by hand: which product, softmax and product of a graph are one scaled-dot-product attention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from memopt.program import InputKind, Program, is_random
from memopt.rewrite import Refused

aten = torch.ops.aten

PRODUCTS = frozenset({aten.bmm.default, aten.baddbmm.default, aten.mm.default})
METADATA_CHECKS = frozenset({aten._assert_tensor_metadata.default})
"""They read no values, and what they check was true when the program was captured."""

_RESHAPES = frozenset({
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.clone.default, aten.alias.default,
    aten.detach.default,
})  # fmt: skip
_PERMUTES = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})
_MULTIPLIES = frozenset({aten.mul.Tensor, aten.mul.Scalar})
_DIVIDES = frozenset({aten.div.Tensor, aten.div.Scalar})
_SCALARS = frozenset({aten.full.default, aten.scalar_tensor.default})
_SCALAR_COPIES = frozenset({
    aten.lift_fresh_copy.default, aten.clone.default, aten.alias.default, aten.detach.default
})  # fmt: skip
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
    if node.target not in _PERMUTES:
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


def _swaps(node: fx.Node, rows: int, columns: int) -> bool:
    """Whether the node transposes the matrices of these sizes that its operand holds."""
    moved = _moved(node)
    if moved is None or len(moved) < 2:
        return False
    straight = sorted(moved)
    sizes = [shape(node.args[0])[dim] for dim in straight[-2:]]
    return moved == [*straight[:-2], straight[-1], straight[-2]] and sizes == [rows, columns]


def _widens(node: fx.Node) -> bool:
    """Whether the node is a cast that only adds precision."""
    if node.target is not aten._to_copy.default:
        return False
    old, new = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if old.device != new.device or not (old.is_floating_point() and new.is_floating_point()):
        return False
    return old.dtype == new.dtype or new.dtype is torch.float32


def _factor(program: Program, node: fx.Node) -> float | None:
    """What the node multiplies its first operand with, if that is all it does."""
    if node.target not in _MULTIPLIES | _DIVIDES or node.kwargs:
        return None
    by = number_of(program, node.args[1])
    if by is None or not by or not math.isfinite(by) or not isinstance(node.args[0], fx.Node):
        return None
    return by if node.target in _MULTIPLIES else 1 / by


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
    if keeps_order(node) or _widens(node):
        yield args[0], ()
    factor = _factor(program, node)
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
        factor = _factor(program, node)
        if factor is not None:
            scale *= factor
        elif _swaps(node, *((rows, columns) if transposed else (columns, rows))):
            transposed = not transposed
        elif not keeps_order(node) and not _widens(node):
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
    known = (aten.add.Tensor, aten.sub.Tensor, *_MULTIPLIES, *_DIVIDES, *_PERMUTES) if up else ()
    return found, [n for n in seen if n.target not in known and not keeps_order(n) and not _is_cast(n)]


def _is_elementwise(node: fx.Node, size: int) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or (isinstance(value, torch.Tensor) and value.numel() != size):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True  # an item of a multiple result
    return torch.Tag.pointwise in node.target.tags or is_random(node) or keeps_order(node) or _is_cast(node)
