"""The gradients with which backward begins, where a model returns no loss and its caller computes one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from memopt.memory.rounding import allocated_bytes

# Values as large as the largest output that a loss holds beside the gradients of all outputs at the end of its own
# backward, counted on CPU: none for a sum, two for cross entropy, three for a mean of squares.
_OF_A_LOSS = 3
_SCALARS = 64  # bytes of losses, and of numbers that operators wrap in tensors for a moment


@dataclasses.dataclass(frozen=True)
class Tangents:
    """Gradients of what a call returns, with which backward begins where the caller computes the loss.

    Attributes:
        early: bytes of those that later graphs run beside: of outputs that come from before the last graph.
        loss: bytes that the caller's loss holds when its own backward ends: all of them, and its intermediate values.
    """

    early: int = 0
    loss: int = 0


def tangents_of(roots: Sequence[torch.Tensor]) -> Tangents:
    """The gradients that backward from these outputs begins with; that of a model's own loss is not worth counting."""
    by_node: dict[Any, int] = {}
    sizes = [0]
    for leaf in roots:
        size = allocated_bytes(leaf.numel() * leaf.element_size(), leaf.device)
        sizes.append(0 if leaf.numel() == 1 else size)
        by_node[leaf.grad_fn] = by_node.get(leaf.grad_fn, 0) + sizes[-1]
    made = [node for node in by_node if node is not None]
    last = max(made, key=lambda node: int(node._sequence_nr()), default=None)
    early = sum(size for node, size in by_node.items() if node is not last)
    return Tangents(early, sum(sizes) + _OF_A_LOSS * max(sizes) + _SCALARS) if any(sizes) else Tangents()
