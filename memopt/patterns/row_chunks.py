"""A region of rows in chunks: the nodes that compute it piece by piece, in place of those that computed it at once."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memopt.graph.rewrite import erase_unused
from memopt.patterns.grad_in_forward import GradInForward
from memopt.patterns.product_sums import ADD_PRODUCT, WIDE_PRODUCT, in_float32
from memopt.patterns.rows import HALVES, NLL_FORWARD, PRODUCTS, Count, RowRegion, Rows, lead_of
from memopt.program import Phase, is_view
from memopt.torch_compat import pytree

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default


def run_in_chunks(region: RowRegion, chunk: int, ahead: GradInForward | None = None, waiting: int = 1) -> list[str]:
    """Edit the graph so that the region runs in chunks of rows; the last chunk may be smaller.

    Narrow values are put together again from the chunks' rows, sums over rows are added up (those of half precision in
    float32, rounded once at the end: matrices by the library that multiplies, where it can, else `waiting` at a time),
    and what backward needs of the wide values of forward is recomputed for each chunk; with `ahead` backward's
    values are computed in forward, next to those.

    Args:
        region: of a program that is being edited.
        chunk: rows of one chunk.
        ahead: how backward's values are computed in forward; None: they are computed in backward.
        waiting: how many chunks' shares in a weight's gradient wait to be added up at once.

    Returns:
        Names of the new nodes that stand for a value of the old graph.
    """
    bounds = [(start, min(start + chunk, region.rows)) for start in range(0, region.rows, chunk)]
    known = _Known({}, {}, _read_by_backward(region) if ahead is None else frozenset())
    after: list[str] = []
    for phase in (Phase.FORWARD, Phase.BACKWARD) if ahead is None else (Phase.FORWARD,):
        if region.nodes[phase]:
            after += _Half(region, phase, known, ahead, waiting).build(bounds)
    old = [node for phase in Phase for node in region.nodes[phase]]
    erase_unused(region.product.graph, [user for node in old for user in node.users] + old)
    return after


@dataclasses.dataclass(frozen=True)
class _Known:
    """What forward and backward tell each other.

    Attributes:
        whole: narrow values put together from the chunks, [rows, ...].
        replaced: items of the fused loss, and of backward what is computed ahead, and what stands for them now.
        read: narrow forward values that the chunks of backward read.
    """

    whole: dict[fx.Node, fx.Node]
    replaced: dict[fx.Node, fx.Node]
    read: frozenset[fx.Node]


def _read_by_backward(region: RowRegion) -> frozenset[fx.Node]:
    """The narrow forward values from which backward computes, the wide ones that it recomputes included."""
    found: set[fx.Node] = set()
    work = list(region.nodes[Phase.BACKWARD])
    while work:
        recipe = region.recipes[work.pop()]
        for leaf in pytree.tree_leaves((recipe.args, recipe.kwargs)):
            if not isinstance(leaf, Rows) or leaf.node not in region.recipes or leaf.node in found:
                continue
            if leaf.node.meta["phase"] is Phase.FORWARD:
                found.add(leaf.node)
                work += [leaf.node] if leaf.node in region.wide else []
    return frozenset(found - region.wide)


class _Half:
    """The chunks of one graph of the step; of both, where backward's values are computed ahead."""

    def __init__(
        self, region: RowRegion, phase: Phase, known: _Known, ahead: GradInForward | None, waiting: int
    ) -> None:
        self.region, self.phase, self.graph, self.known = region, phase, region.product.graph, known
        self.ahead = ahead
        self.nodes = region.nodes[phase] if ahead is None else (*region.nodes[phase], *region.nodes[Phase.BACKWARD])
        self.inside = frozenset(self.nodes)
        self.anchor = region.nodes[phase][-1]
        self.weights: dict[fx.Node, fx.Node] = {}  # of fused losses
        self.views: dict[fx.Node, fx.Node] = {}
        self.chunks: dict[fx.Node, fx.Node] = {}
        self.start, self.stop = 0, 0
        self.before = self.anchor.prev  # what the present chunk, and what was copied for it, stand behind
        self.waiting = waiting

    def build(self, bounds: Sequence[tuple[int, int]]) -> list[str]:
        wanted = [node for node in self.nodes if node not in self.region.wide]
        pieces: dict[fx.Node, list[fx.Node]] = {node: [] for node in wanted}
        for node in reversed(self.region.late[self.phase]):
            self.anchor.append(node)
        with self.graph.inserting_before(self.anchor):
            if self.ahead is not None:
                self._prepare(self.ahead)
            for self.start, self.stop in bounds:
                self.chunks, self.before = {}, self.anchor.prev
                for node in self.nodes:
                    made = self._compute(node)
                    if node in pieces and self.region.recipes[node].summed:
                        pieces[node] = self._added(node, pieces[node], made, last=self.stop == self.region.rows)
                    elif node in pieces:
                        pieces[node].append(self._stored(node, made))
            return [self._put_together(node, pieces[node]).name for node in wanted if self._is_read(node)]

    def _is_read(self, node: fx.Node) -> bool:
        """Whether anything outside this phase's chunks reads the narrow value."""
        return node in self.known.read or any(user not in self.inside for user in node.users)

    def _prepare(self, ahead: GradInForward) -> None:
        """Compute what backward's values are computed from, with one for the tangent."""
        for node in ahead.first:
            self.anchor.prepend(node)
        value = ahead.tangent.meta["val"]
        options = {"dtype": value.dtype, "device": value.device}
        replaced = self.known.replaced
        replaced[ahead.tangent] = self._call(self.anchor, aten.full.default, ([], 1.0), options, "one")
        for node in self.nodes:
            if node.target is NLL_FORWARD:
                rounded = self._rounded_weights(node, node.meta["val"][0])
                replaced.update({item: rounded for item in node.users if item.args[1] == 1})
        for node in ahead.copied:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: replaced.get(n, n))
            replaced[node] = self._call(node, node.target, args, kwargs, "ahead")

    # -- one chunk -----------------------------------------------------------------------------------------------

    def _compute(self, node: fx.Node) -> fx.Node:
        """The node's value for the present chunk; a wide value of the other phase is recomputed."""
        if node not in self.chunks:
            recipe = self.region.recipes[node]
            args, kwargs = pytree.tree_map(self._operand, (recipe.args, recipe.kwargs))
            made = args[0] if recipe.target is None else self._call(node, recipe.target, args, kwargs, "chunk")
            if node.target is NLL_FORWARD:
                made = self._call(node, operator.getitem, (made, 0), {}, "chunk")
            self.chunks[node] = made
        return self.chunks[node]

    def _operand(self, leaf: Any) -> Any:
        if isinstance(leaf, Count):
            return self.stop - self.start
        if isinstance(leaf, Rows):
            rows = self._rows_of(leaf.node)
            return self._call(leaf.node, aten.permute.default, (rows, [1, 0]), {}, "turned") if leaf.turned else rows
        return self._here(leaf) if isinstance(leaf, fx.Node) else leaf

    def _rows_of(self, node: fx.Node) -> fx.Node:
        if node in self.region.wide or node in self.inside:
            return self._compute(node)
        if node in self.chunks:
            return self.chunks[node]
        shape = node.meta["val"].shape
        if math.prod(shape[lead_of(shape, self.region.rows) :]) > 1:
            self.chunks[node] = self._part(node, aten.slice.Tensor)
            return self.chunks[node]
        # A number for each row lies in memory of its own for every chunk: kernels that begin to read a tensor at
        # another place for each chunk are other kernels, each of which an engine compiles and times. The copies stand
        # where the chunk begins: no kernel of the chunk's is cut in two by one.
        with self.graph.inserting_before(self.before.next):
            self.chunks[node] = self.before = self._part(node, aten.slice_copy.Tensor)
        return self.before

    def _part(self, node: fx.Node, target: Any) -> fx.Node:
        """The present chunk's rows of a value from outside, or of the other phase's."""
        value = self.known.whole.get(node) or self._flat(node)
        return self._call(node, target, (value, 0, self.start, self.stop), {}, "rows")

    def _flat(self, node: fx.Node) -> fx.Node:
        """A value from outside with its rows along the first dimension."""
        shape = node.meta["val"].shape
        lead = lead_of(shape, self.region.rows)
        if lead == 1:
            return self._here(node)
        if node not in self.views:
            self.views[node] = self._call(
                node, aten.view.default, (self._here(node), [self.region.rows, *shape[lead:]]), {}, "flat"
            )
        return self.views[node]

    def _here(self, node: fx.Node) -> fx.Node:
        """A value from outside; a forward view that backward reads is made anew, so that its base is what is saved."""
        node = self.known.replaced.get(node, node)
        if self.phase is Phase.FORWARD or node.meta.get("phase") is not Phase.FORWARD or not is_view(node):
            return node
        if node not in self.views:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._here)
            self.views[node] = self._call(node, node.target, args, kwargs, "again")
        return self.views[node]

    def _call(
        self, node: fx.Node, target: Any, args: Any, kwargs: Any, suffix: str, phase: Phase | None = None
    ) -> fx.Node:
        made = self.graph.create_node("call_function", target, tuple(args), dict(kwargs), name=f"{node.name}_{suffix}")
        made.meta = {key: value for key, value in node.meta.items() if key not in ("val", "inplace", "recomputes")}
        made.meta["phase"] = phase or self.phase
        return made

    def _stored(self, node: fx.Node, made: fx.Node) -> fx.Node:
        """The chunk's value, in memory before the next chunk: seen through as_strided Inductor has to store it.

        Else it computes the values of all chunks where they are joined, and keeps all chunks of logits until then.
        """
        value = node.meta["val"]
        if made.target in PRODUCTS or not isinstance(value, torch.Tensor):
            return made  # library calls store what they give
        rest = list(value.shape[lead_of(value.shape, self.region.rows) :])
        shape = [self.stop - self.start, *rest]
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        copied = self._call(node, aten.clone.default, (made,), {"memory_format": torch.contiguous_format}, "stored")
        return self._call(node, aten.as_strided.default, (copied, shape, strides), {}, "piece")

    # -- all chunks ----------------------------------------------------------------------------------------------

    def _added(self, node: fx.Node, before: list[fx.Node], made: fx.Node, *, last: bool) -> list[fx.Node]:
        """The sum over the chunks so far, and what waits to be added to it.

        A weight's gradient is in memory before the next chunk: else Inductor keeps the products of all chunks, and adds
        them up where the sum is read.
        """
        product, half = made.target is aten.mm.default, node.meta["val"].dtype in HALVES
        if product and half and in_float32(node.meta["val"]):
            return [self._multiplied_and_added(node, before, made)]
        if product and half:
            return self._added_together(node, [*before, made], last=last)
        if not before:
            return [made]
        if product:
            operands = made.args
            self.graph.erase_node(made)
            return [self._call(node, aten.addmm.default, (before[0], *operands), {}, "sum")]
        return [self._call(node, aten.add.Tensor, (before[0], made), {}, "sum")]

    def _multiplied_and_added(self, node: fx.Node, before: list[fx.Node], made: fx.Node) -> fx.Node:
        """The sum in float32 after another chunk's product, which the library adds to the sum so far."""
        operands = made.args
        self.graph.erase_node(made)
        if before:
            return self._call(node, ADD_PRODUCT, (before[0], *operands), {}, "sum")
        return self._call(node, WIDE_PRODUCT, operands, {}, "wide")

    def _added_together(self, node: fx.Node, parts: list[fx.Node], *, last: bool) -> list[fx.Node]:
        """Matrices of half precision, and before them the sum so far if there is one, added up where there are enough.

        The last sum of all is the value itself: it is rounded by the kernel that makes it.
        """
        begun = parts[0].target is aten.as_strided.default
        if not last and len(parts) - begun < self.waiting:
            return parts
        total = parts[0] if begun else self._call(node, _CONVERT, (parts[0], torch.float32), {}, "wide")
        for part in parts[1:]:
            total = self._call(node, aten.add.Tensor, (total, part), {}, "sum")
        if last:
            total = self._call(node, _CONVERT, (total, node.meta["val"].dtype), {}, "rounded")
        return [self._running(node, total)]

    def _running(self, node: fx.Node, total: fx.Node) -> fx.Node:
        """A matrix, a sum so far say, as it stands in memory: a view that Inductor cannot look through."""
        shape = list(node.meta["val"].shape)
        return self._call(node, aten.as_strided.default, (total, shape, [shape[1], 1]), {}, "running")

    def _put_together(self, node: fx.Node, pieces: list[fx.Node]) -> fx.Node:
        value, recipe = node.meta["val"], self.region.recipes[node]
        if node.target is NLL_FORWARD:
            return self._loss(node, self._joined(node, pieces))
        if recipe.summed:
            result = pieces[0]
            if value.dtype in HALVES and result.target is not aten.as_strided.default:  # shares are rounded already
                by_library = result.target in (ADD_PRODUCT, WIDE_PRODUCT)
                result = self._call(node, _CONVERT, (result, value.dtype), {}, "rounded")
                result = self._running(node, result) if by_library else result
            shaped = value.ndim > 2
        else:
            result = self.known.whole[node] = self._joined(node, pieces)
            shaped = lead_of(value.shape, self.region.rows) != 1
        if self.ahead is not None and node.meta["phase"] is Phase.BACKWARD:
            with self.graph.inserting_before(node):
                return self._scaled(node, result, shaped)
        if shaped:
            result = self._call(node, aten.view.default, (result, list(value.shape)), {}, "shaped")
        self._replace(node, result)
        return result

    def _scaled(self, node: fx.Node, result: fx.Node, shaped: bool) -> fx.Node:
        """What was computed ahead as it is in backward: times the tangent, if it is proportional to that."""
        assert self.ahead is not None
        if node in self.ahead.scaled:
            operands = (result, self.ahead.tangent)
            result = self._call(node, aten.mul.Tensor, operands, {}, "scaled", Phase.BACKWARD)
        if shaped:
            shape = list(node.meta["val"].shape)
            result = self._call(node, aten.view.default, (result, shape), {}, "shaped", Phase.BACKWARD)
        self._replace(node, result)
        return result

    def _joined(self, node: fx.Node, pieces: list[fx.Node]) -> fx.Node:
        return self._call(node, aten.cat.default, (pieces, 0), {}, "joined")

    def _replace(self, node: fx.Node, result: fx.Node) -> None:
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in self.region.recipes)

    def _loss(self, node: fx.Node, losses: fx.Node) -> fx.Node:
        """The loss from each row's: as it is, its sum, or its sum over the sum of the rows' weights."""
        reduction = node.args[3]
        value = node.meta["val"][0]
        weights, rounded = self._weights(node, value), self._rounded_weights(node, value)
        result = losses
        if reduction:
            half = value.dtype in HALVES
            wide = {"dtype": torch.float32} if half else {}
            result = self._call(node, aten.sum.default, (losses,), wide, "total")
            if reduction == 1:
                result = self._call(node, aten.div.Tensor, (result, weights), {}, "mean")
            if half:
                result = self._call(node, _CONVERT, (result, value.dtype), {}, "rounded")
        for item in list(node.users):
            self.known.replaced[item] = (result, rounded)[item.args[1]]  # type: ignore[index]
            item.replace_all_uses_with(
                self.known.replaced[item], delete_user_cb=lambda user: user not in self.region.recipes
            )
        return result

    def _rounded_weights(self, node: fx.Node, value: torch.Tensor) -> fx.Node:
        """The sum of the weights in the loss's own precision."""
        weights = self._weights(node, value)
        if not node.args[3] or value.dtype not in HALVES:
            return weights
        return self._call(node, _CONVERT, (weights, value.dtype), {}, "weight")

    def _weights(self, node: fx.Node, value: torch.Tensor) -> fx.Node:
        """The sum of the weights of the rows' labels, in float32 or wider; zero where the loss is not reduced."""
        if node not in self.weights:
            self.weights[node] = self._sum_of_weights(node, value)
        return self.weights[node]

    def _sum_of_weights(self, node: fx.Node, value: torch.Tensor) -> fx.Node:
        _, labels, weight, reduction, ignored = node.args
        dtype = torch.float32 if value.dtype in HALVES else value.dtype
        if not reduction:
            return self._call(
                node, aten.full.default, ([], 0.0), {"dtype": value.dtype, "device": value.device}, "weight"
            )
        counted = self._call(node, aten.ne.Scalar, (labels, ignored), {}, "counted")
        if weight is not None:
            safe = self._call(node, aten.where.ScalarOther, (counted, labels, 0), {}, "safe")
            picked = self._call(node, aten.index_select.default, (weight, 0, safe), {}, "picked")
            counted = self._call(node, aten.where.ScalarOther, (counted, picked, 0), {}, "weights")
        return self._call(node, aten.sum.default, (counted,), {"dtype": dtype}, "weight")
