"""Products of one matrix with several weights, which may be one product where the weights lie side by side."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from memopt.program import InputKind, Program
from memopt.torch_compat.storages import storage_id

aten = torch.ops.aten

_TURNS = {aten.t.default: (), aten.permute.default: ([1, 0],), aten.transpose.int: (0, 1)}
_ALIGNED = 16  # bytes: what fast products ask of a matrix


@dataclasses.dataclass(frozen=True)
class Product:
    """x · weightᵀ, plus a vector or not.

    Attributes:
        node: the call, `mm` or `addmm`.
        weight: the placeholder of the weight, a parameter of (outputs, inputs).
        bias: the placeholder of the vector; None without one.
    """

    node: fx.Node
    weight: fx.Node
    bias: fx.Node | None


def products_of_one(program: Program) -> list[list[Product]]:
    """Groups of two and more products of the same matrix with contiguous parameters that nothing else reads."""
    changed = program.mutated
    usable = {
        entry.name
        for entry in program.inputs
        if entry.kind is InputKind.PARAMETER and entry.name in program.state and entry.name not in changed
    }
    groups: dict[tuple[fx.Node, torch.Size, bool], list[Product]] = {}
    for node in program.calls:
        found = _product(node, usable)
        if found is not None:
            x: Any = node.args[-2]
            groups.setdefault((_seen_through(x), x.meta["val"].shape, found.bias is None), []).append(found)
    return [group for group in groups.values() if len(group) > 1 and _alike(group)]


def adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether contiguous tensors lie one after the other in one storage."""
    return all(
        storage_id(a) == storage_id(b) and a.data_ptr() + a.numel() * a.element_size() == b.data_ptr()
        for a, b in itertools.pairwise(tensors)
    )


def _product(node: fx.Node, usable: Collection[str]) -> Product | None:
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return None
    turned: Any = node.args[-1]
    if turned.target not in _TURNS or tuple(turned.args[1:]) != _TURNS[turned.target] or len(turned.users) > 1:
        return None
    weight: Any = turned.args[0]
    bias: Any = node.args[0] if node.target is aten.addmm.default else None
    if weight.name not in usable or len(weight.users) > 1 or not weight.meta["val"].is_contiguous():
        return None
    if bias is not None and (bias.name not in usable or tuple(bias.meta["val"].shape) != weight.meta["val"].shape[:1]):
        return None
    return Product(node, weight, bias)


def _seen_through(node: fx.Node) -> fx.Node:
    """What is viewed: each layer as captured makes a view of its own."""
    while node.target in (aten.view.default, aten._unsafe_view.default):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _alike(group: Sequence[Product]) -> bool:
    values = [product.weight.meta["val"] for product in group]
    aligned = all(value.numel() * value.element_size() % _ALIGNED == 0 for value in values)
    return aligned and len({(value.shape[1], value.dtype, value.device) for value in values}) == 1
