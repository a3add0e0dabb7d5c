"""Slices of the batch of an operator that is too large to be run: they tell what it takes beside its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memopt.torch_compat.fake_tensors import FakeTensorMode
from memopt.torch_compat.recurrent_layers import RECURRENT, RECURRENT_BACKWARD

# Operators whose workspace only a run tells, and is linear in the batch: which arguments have one, in which dimension.
_BATCHED: Mapping[Any, tuple[tuple[int, ...], int]] = {
    torch.ops.aten.convolution.default: ((0,), 0),
    torch.ops.aten.convolution_backward.default: ((0, 1), 0),
    RECURRENT: ((0, 1), -2),
    RECURRENT_BACKWARD: ((0, 2, 3, 4), -2),
}
_PARTS = 8, 4  # slices, of the whole batch


def batch_of(node: fx.Node) -> int:
    """How large the batch of a call node is; 0 where its workspace is not known to be linear in one, as CUDA's."""
    batched = [each.meta["val"] for each in _batched(node)]
    return batched[0].shape[_BATCHED[node.target][1]] if batched and batched[0].device.type == "cpu" else 0


def has_slices(node: fx.Node) -> bool:
    """Whether the batch of a call node is large enough for `slices_of`."""
    return batch_of(node) >= max(_PARTS)


def slices_of(node: fx.Node) -> list[fx.Node]:
    """The same call of an eighth and of a quarter of its batch, each in a graph of its own; none of a batch below 8."""
    return [_slice(node, batch_of(node) // parts) for parts in _PARTS] if has_slices(node) else []


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
        fx.map_arg([node.args[place] for place in _BATCHED[node.target][0]], found.append)
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
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operand)
        found = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        found.name = f"{node.name}_of_{size}"
        given, named = fx.map_arg((args, kwargs), lambda each: each.meta["val"])
        found.meta["val"] = node.target(*given, **named)  # type: ignore[operator]
    return found
