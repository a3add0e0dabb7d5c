"""Slices of the batch of an operator that is too large to be run: they tell what it takes beside its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memopt.memory.cost.scratch import needs_none
from memopt.torch_compat.fake_tensors import FakeTensorMode
from memopt.torch_compat.recurrent_layers import RECURRENT, RECURRENT_BACKWARD

# Operators whose workspace only a run tells, and is linear in the batch: which arguments have one, in which dimension.
_BATCHED: Mapping[Any, tuple[tuple[int, ...], int]] = {
    torch.ops.aten.convolution.default: ((0,), 0),
    torch.ops.aten.convolution_backward.default: ((0, 1), 0),
    RECURRENT: ((0, 1), -2),
    RECURRENT_BACKWARD: ((0, 2, 3, 4), -2),
    torch.ops.aten.mm.default: ((0,), 0),
    torch.ops.aten.addmm.default: ((1,), 0),
    torch.ops.aten.bmm.default: ((0, 1), 0),
    torch.ops.aten.native_batch_norm_backward.default: ((0, 1), 0),
    torch.ops.aten._native_batch_norm_legit_functional.default: ((0,), 0),
    torch.ops.aten.native_group_norm.default: ((0,), 0),
    torch.ops.aten.native_group_norm_backward.default: ((0, 1, 2, 3), 0),
    torch.ops.aten.max_pool2d_with_indices.default: ((0,), 0),
    torch.ops.aten.max_pool2d_with_indices_backward.default: ((0, 1, 7), 0),
}
# Where such an operator is told the size of the batch as well.
_NUMBERS: Mapping[Any, int] = {
    torch.ops.aten.native_group_norm.default: 3,
    torch.ops.aten.native_group_norm_backward.default: 5,
}
_PARTS = 8, 4  # slices, of the whole batch
_LEAST = 1, 2  # sizes of slices, where those have no room either, or the batch is small
_OF_SEVERAL = frozenset({torch.ops.aten._native_batch_norm_legit_functional.default})  # one number has no variance
_LEAST_OF_SEVERAL = 2, 3


def batch_of(node: fx.Node) -> int:
    """How large the batch of a call node is; 0 where its workspace is not known to be linear in one, as CUDA's."""
    batched = [] if needs_none(node) else [each.meta["val"] for each in _batched(node)]
    return batched[0].shape[_BATCHED[node.target][1]] if batched and batched[0].device.type == "cpu" else 0


def has_slices(node: fx.Node) -> bool:
    """Whether the batch of a call node is large enough for `slices_of`."""
    return batch_of(node) > max(_least(node))


def slices_of(node: fx.Node) -> Iterator[list[fx.Node]]:
    """The same call of two parts of its batch, each in a graph of its own: the larger parts first; none of a small one.

    An eighth and a quarter, of a batch that has so many; one and two, or two and three of what takes a variance.
    """
    batch, least = batch_of(node), _least(node)
    sizes = [tuple(batch // parts for parts in _PARTS)] if batch >= max(_PARTS) * min(least) else []
    for size in dict.fromkeys([*sizes, least]) if has_slices(node) else ():
        yield [_slice(node, each) for each in size]


def _least(node: fx.Node) -> tuple[int, int]:
    return _LEAST_OF_SEVERAL if node.target in _OF_SEVERAL else _LEAST


def extrapolated(found: Sequence[tuple[int, int]], batch: int) -> int:
    """The bytes of a batch, from those of two smaller ones.

    Args:
        found: size and bytes of each, the smaller one first.
        batch: the size of the whole.
    """
    (less, low), (more, high) = found
    return round(low + max(0, high - low) / (more - less) * (batch - less))


def _batched(node: fx.Node) -> list[fx.Node]:
    found = list[fx.Node]()
    if node.target in _BATCHED:
        fx.map_arg([node.args[place] for place in _BATCHED[node.target][0] if place < len(node.args)], found.append)
    return found


def _slice(node: fx.Node, size: int) -> fx.Node:
    graph, made, batched = fx.Graph(), dict[fx.Node, fx.Node](), _batched(node)

    def operand(given: fx.Node) -> fx.Node:
        if given not in made:
            value = given.meta["val"]
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            if given in batched:
                fake = torch.empty_like(fake.narrow(_BATCHED[node.target][1], 0, size))
            made[given] = graph.placeholder(given.name)
            made[given].meta["val"] = fake
        return made[given]

    with FakeTensorMode(), torch.no_grad():
        number = _NUMBERS.get(node.target)
        sized = tuple(size if place == number else arg for place, arg in enumerate(node.args))
        args, kwargs = fx.map_arg((sized, dict(node.kwargs)), operand)
        found = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        found.name = f"{node.name}_of_{size}"
        given, named = fx.map_arg((args, kwargs), lambda each: each.meta["val"])
        found.meta["val"] = node.target(*given, **named)  # type: ignore[operator]
    return found
