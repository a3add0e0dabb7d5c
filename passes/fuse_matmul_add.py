"""FuseMatmulAdd: a matrix product takes the addition that follows it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
from torch import fx

from memopt.graph.rewrite import VIEWS, Refused, erase_unused, fake_value, storages
from memopt.pass_manager import Change, Pass, PassResult, attempt_each
from memopt.program import Program

aten = torch.ops.aten
_FUSED = {aten.mm.default: aten.addmm.default, aten.bmm.default: aten.baddbmm.default}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class FuseMatmulAdd(Pass):
    """Let `addmm` or `baddbmm` compute a product and a sum at once, so that the bare product is never stored.

    Algebra: k·(AB) + s·C = addmm(C, A, B, alpha=k, beta=s), and batch by batch for `baddbmm`. The product is rounded
    once instead of twice or three times; where C is far larger than AB the order of the sums may cost a few units in
    the last place, hence the tolerance.

    Cases:
        1. `add` or `sub`, on either side and with any `alpha`, of `mm` or `bmm` and a tensor that broadcasts to it.
        2. A multiplication or division of the product by a number in between becomes alpha.
        3. A view in between moves behind the sum when the addend can be viewed in the product's own shape: a vector
           over the last dimension, a tensor of the sum's shape, or for `bmm` one that spans all batches or none.
        4. Of two products that are added, the later one takes the earlier one.

    Refusals:
        - The product, or a value between it and the sum, has other users or is an output.
        - Dtypes or devices differ, or the dtype is no floating-point one.
        - The sum is larger than the product, or laid out otherwise; the addend has no view in the product's shape.
        - A factor is zero or not finite (beta = 0 would drop a NaN).
        - The addend comes after the product, and waiting for it would keep more bytes of operands than the product has.

    Training programs are returned unchanged: their backward graph reads what the forward graph rounds.
    """

    name: ClassVar[str] = "fuse_matmul_add"
    tolerance: ClassVar[float] = 4.0

    def run(self, program: Program) -> PassResult:
        """Return the program with each sum of a product fused that can be."""
        if program.training:
            return PassResult(program)
        new = program.copy()
        order = {node: index for index, node in enumerate(new.graph.nodes)}

        def fuse(node: fx.Node) -> Change | None:
            match = _match(node, order) if node.target in (aten.add.Tensor, aten.sub.Tensor) else None
            return None if match is None else _fuse(new, node, match, order)

        changes, refusals = attempt_each(new.calls, fuse)
        return PassResult.of(program, new, changes, refusals)


@dataclasses.dataclass(frozen=True)
class _Match:
    """A sum of `scale` times a product, and of an addend.

    Attributes:
        between: nodes from the sum's operand back to the product, the product left out.
        alpha, beta: factors of the product and of the addend.
    """

    product: fx.Node
    between: tuple[fx.Node, ...]
    addend: fx.Node
    alpha: float
    beta: float


def _match(total: fx.Node, order: dict[fx.Node, int]) -> _Match | None:
    left, right = total.args
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or left is right:
        return None
    factor = float(total.kwargs.get("alpha", 1)) * (1 if total.target is aten.add.Tensor else -1)  # type: ignore[arg-type]
    found: list[_Match] = []
    for operand, addend, alpha, beta in ((left, right, 1.0, factor), (right, left, factor, 1.0)):
        product, between, scale = _product(operand)
        if product is not None:
            found.append(_Match(product, between, addend, alpha * scale, beta))
    if not found:
        return None
    return max(found, key=lambda match: order[match.product])


def _product(operand: fx.Node) -> tuple[fx.Node | None, tuple[fx.Node, ...], float]:
    """The matrix product behind the operand, the views and scalings between, and their factor."""
    between: list[fx.Node] = []
    node, scale = operand, 1.0
    while node.target not in _FUSED:
        if node.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(node.args[1], (int, float)):
            by = float(node.args[1])
            scale = scale * by if node.target is aten.mul.Tensor else scale / by if by else math.inf
        elif node.target not in VIEWS:
            return None, (), 1.0
        between.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return node, tuple(between), scale


def _fuse(program: Program, total: fx.Node, match: _Match, order: dict[fx.Node, int]) -> Change:
    """Rewrite one match in the program being edited. Raises Refused before anything is edited."""
    product, graph = match.product, program.graph
    value, out = product.meta["val"], total.meta["val"]
    for node in (product, *match.between):
        if len(node.users) > 1:
            raise Refused(f"{node.name}, which it adds to, has other users")
    if value.dtype not in _FLOATS:
        raise Refused(f"the product is of {value.dtype}, no floating-point dtype")
    for node in (total, match.addend, *match.between):
        other = node.meta["val"]
        if (other.dtype, other.device) != (value.dtype, value.device):
            raise Refused(
                f"{node.name} is {other.dtype} on {other.device}, the product {value.dtype} on {value.device}"
            )
    if any(factor == 0 or not math.isfinite(factor) for factor in (match.alpha, match.beta)):
        raise Refused("a factor of the sum is zero or not finite")
    if out.shape != _seen_shape(match):
        raise Refused("the sum is larger than the product")
    shape = _addend_shape(match)
    late = order[match.addend] > order[product]
    if late:
        _check_lifetimes(graph, total, product)
    views = [node for node in reversed(match.between) if node.target in VIEWS]
    addend: Any = match.addend.meta["val"]
    factors: dict[str, Any] = {name: f for name, f in (("beta", match.beta), ("alpha", match.alpha)) if f != 1}
    target = _FUSED[product.target]  # type: ignore[index]
    if shape is not None:
        try:
            addend = fake_value(program, aten.view.default, (match.addend, shape))
        except (RuntimeError, ValueError):
            raise Refused(f"{match.addend.name} has no view in the product's shape") from None
    result = fake_value(program, target, (addend, *product.args), factors)
    for view in views:
        result = fake_value(program, view.target, (result, *view.args[1:]))  # type: ignore[arg-type]
    if result.stride() != out.stride():
        raise Refused("the sum is laid out otherwise than the product")

    anchor = total if late else product
    meta = {key: item for key, item in total.meta.items() if key != "val"}
    with graph.inserting_before(anchor):
        source = match.addend
        if shape is not None:
            source = graph.call_function(aten.view.default, (match.addend, shape))
            source.meta = {**meta, "val": addend}
        fused = graph.create_node("call_function", target, (source, *product.args), factors, f"{product.name}_fused")
        fused.meta = {**meta, "val": fake_value(program, target, (source, *product.args), factors)}
    last = fused
    with graph.inserting_before(total):
        for view in views:
            last = graph.call_function(view.target, (last, *view.args[1:]))  # type: ignore[arg-type]
            last.meta = {**view.meta, "val": fake_value(program, view.target, last.args)}  # type: ignore[arg-type]
            order[last] = order[total]
    order.setdefault(source, order[anchor])
    order[fused] = order[anchor]
    total.replace_all_uses_with(last)
    erase_unused(graph, [product, *reversed(match.between), total])
    names = (product.name, *(node.name for node in reversed(match.between)), total.name)
    return Change(f"{total.name} became part of {product.name}", names, (fused.name,))


def _seen_shape(match: _Match) -> torch.Size:
    """The shape of the product as the sum reads it, behind the views."""
    node = match.between[0] if match.between else match.product
    return node.meta["val"].shape  # type: ignore[no-any-return]


def _addend_shape(match: _Match) -> list[int] | None:
    """The shape in which the addend is to be viewed; None when it broadcasts to the product as it is."""
    seen, own = list(_seen_shape(match)), list(match.product.meta["val"].shape)
    addend = list(match.addend.meta["val"].shape)
    if seen == own:
        return None
    addend = [1] * (len(seen) - len(addend)) + addend
    if addend == seen:
        return own
    if seen[-1] == own[-1] and all(size == 1 for size in addend[:-1]):
        return None if match.addend.meta["val"].ndim <= 1 else addend[-1:]
    if len(own) == 3 and seen[-2:] == own[-2:]:
        if all(size == 1 for size in addend[:-2]):
            return [1, *addend[-2:]]
        if addend[:-2] == seen[:-2]:
            return [own[0], *addend[-2:]]
    raise Refused(f"{match.addend.name} has no view in the product's shape")


def _check_lifetimes(graph: fx.Graph, total: fx.Node, product: fx.Node) -> None:
    """Raise Refused when running the product at the sum's place keeps more bytes alive than the product has."""
    kept: set[int] = set()
    started = False
    for node in graph.nodes:
        started = started or node is total
        if node.op == "placeholder":
            kept |= storages(node).keys()
        elif started:
            for operand in node.all_input_nodes:
                kept |= storages(operand).keys()
    waiting = {key: size for operand in product.all_input_nodes for key, size in storages(operand).items()}
    extra = sum(size for key, size in waiting.items() if key not in kept)
    own = sum(storages(product).values())
    if extra > own:
        raise Refused(f"its addend comes later: waiting would keep {extra} bytes of operands, the product has {own}")
