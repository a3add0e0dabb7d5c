"""Which gradients of a region of rows can be computed together with its loss, before backward begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from memopt.graph.rewrite import descendants
from memopt.patterns.rows import NLL_FORWARD, RowRegion, Rows
from memopt.program import InputKind, Phase, Program, is_effectful, is_random, is_view, tensors_of
from memopt.torch_compat import pytree

aten = torch.ops.aten
prims = torch.ops.prims

# Linear in their one tensor, or in their first one where they have others.
_LINEAR = {
    aten.neg.default, aten.clone.default, aten._to_copy.default, prims.convert_element_type.default,
    aten.sum.default, aten.sum.dim_IntList, aten.expand.default, aten._unsafe_view.default,
    aten.mul.Scalar, aten.div.Scalar, aten.div.Tensor, aten.tanh_backward.default, aten.sigmoid_backward.default,
    aten.nll_loss_backward.default, aten._log_softmax_backward_data.default, aten._softmax_backward_data.default,
}  # fmt: skip
_BILINEAR = {aten.mul.Tensor, aten.mm.default}
_SUMS = {aten.add.Tensor, aten.sub.Tensor}
_FILLED = {aten.full.default: 1, aten.full_like.default: 1, aten.scalar_tensor.default: 0}
_ZEROS = {aten.zeros.default, aten.zeros_like.default}


@dataclasses.dataclass(frozen=True)
class GradInForward:
    """How the backward graph of a region is computed in forward.

    Attributes:
        tangent: the number that the region's gradients are proportional to: what the caller multiplies the loss by.
        first: forward nodes outside of the region that have to come before it, in order.
        copied: backward nodes outside of the region that are to be computed in forward too, with one for the tangent.
        scaled: backward nodes of the region that are proportional to the tangent.
    """

    tangent: fx.Node
    first: tuple[fx.Node, ...]
    copied: tuple[fx.Node, ...]
    scaled: frozenset[fx.Node]


def grad_in_forward(program: Program, region: RowRegion) -> GradInForward | None:
    """How the region's gradients can be computed in forward; None where they cannot.

    They can where all that backward adds is one number, the loss's own gradient, to which they are proportional: with
    the number one instead they are known as soon as the loss is, and are multiplied later. None also in float16: what
    the caller multiplies a loss by keeps its gradients from underflow there, and would come too late.
    """
    forward, backward = region.nodes[Phase.FORWARD], region.nodes[Phase.BACKWARD]
    if not forward or not backward:
        return None
    if any(tensor.dtype == torch.float16 for node in backward for tensor in tensors_of(node)):
        return None
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    results = descendants(forward)
    tangents: set[fx.Node] = set()
    first: set[fx.Node] = set()
    copied: set[fx.Node] = set()
    work = list(_operands(region, backward))
    while work:
        node = work.pop()
        if node in first or node in copied or _is_weight_of_loss(node):
            continue
        if node.op != "call_function":
            if node.op == "placeholder" and program.input_of(node.name).kind is InputKind.TANGENT:
                tangents.add(node)
            continue
        in_backward = node.meta["phase"] is Phase.BACKWARD
        if not in_backward and node not in results and position[node] < position[forward[-1]]:
            continue
        if node in results or is_random(node) or is_effectful(node):
            return None
        (copied if in_backward else first).add(node)
        work.extend(node.all_input_nodes)
    if len(tangents) != 1:
        return None
    (tangent,) = tangents
    if tangent.meta["val"].ndim:
        return None
    views = {user for node in backward for user in node.users if is_view(user)}
    scaled = _proportional(tangent, sorted({*copied, *backward, *views}, key=position.__getitem__))
    if scaled is None:
        return None
    first_ones, copied_ones = (tuple(sorted(nodes, key=position.__getitem__)) for nodes in (first, copied))
    return GradInForward(tangent, first_ones, copied_ones, frozenset(scaled.intersection(backward)))


def _operands(region: RowRegion, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What the nodes read from outside of the region."""
    leaves = (
        leaf.node if isinstance(leaf, Rows) else leaf
        for node in nodes
        for leaf in pytree.tree_leaves((region.recipes[node].args, region.recipes[node].kwargs))
    )
    return {leaf for leaf in leaves if isinstance(leaf, fx.Node) and leaf not in region.recipes}


def _is_weight_of_loss(node: fx.Node) -> bool:
    """Whether the node is the sum of weights that a fused loss gives beside itself: it is known from the labels."""
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and source.target is NLL_FORWARD and bool(node.args[1] == 1)


def _proportional(tangent: fx.Node, nodes: Iterable[fx.Node]) -> set[fx.Node] | None:
    """Those of the nodes that are proportional to the tangent; None where one depends on it in another way."""
    found = {tangent}
    for node in nodes:
        if found.intersection(node.all_input_nodes):
            if not _is_linear(node, found):
                return None
            found.add(node)
    return found


def _is_linear(node: fx.Node, variable: Collection[fx.Node]) -> bool:
    """Whether the node is proportional to its operands among `variable`."""
    tensors: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), tensors.append)
    varies = [tensor in variable for tensor in tensors]
    if is_view(node) or node.target in _LINEAR:
        return varies[0] and not any(varies[1:])
    if node.target in _BILINEAR:
        return sum(varies) == 1
    if node.target in _SUMS:
        return len(varies) == 2 and all(varies)
    if node.target is aten.constant_pad_nd.default:
        return len(node.args) < 3 or bool(node.args[2] == 0)
    if node.target is aten.where.self:
        return not varies[0] and all(value in variable or _is_zero(value) for value in node.args[1:])
    return False


def _is_zero(value: Any) -> bool:
    if not isinstance(value, fx.Node):
        return False
    return value.target in _ZEROS or (value.target in _FILLED and bool(value.args[_FILLED[value.target]] == 0))
