"""The gradients with which backward begins, where a model returns no loss and its caller computes one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from memopt.budget import format_bytes
from memopt.memory.rounding import allocated_bytes
from memopt.program import InputKind, Program, source_line, tensors_of
from memopt.torch_compat.autograd_nodes import order_of

# Values as large as the largest output that a loss holds beside the gradients of all outputs at the end of its own
# backward, counted on CPU: none for a sum, two for cross entropy, three for a mean of squares.
_OF_A_LOSS, _USUAL = 3, 2
_SCALARS = 64  # bytes of losses, and of numbers that operators wrap in tensors for a moment


@dataclasses.dataclass(frozen=True)
class Tangents:
    """Gradients of what a call returns, with which backward begins where the caller computes the loss.

    Attributes:
        early: bytes of those that later graphs run beside: of outputs that come from before the last graph.
        loss: bytes that the caller's loss holds when its own backward ends: all of them, and its intermediate values.
        usual: the same of the loss that is usual, where that is less.
    """

    early: int = 0
    loss: int = 0
    usual: int = 0


def tangents_of(roots: Sequence[torch.Tensor]) -> Tangents:
    """The gradients that backward from these outputs begins with; that of a model's own loss is not worth counting."""
    by_node: dict[Any, int] = {}
    sizes = [_size(leaf) for leaf in roots]
    for leaf, size in zip(roots, sizes, strict=True):
        by_node[leaf.grad_fn] = by_node.get(leaf.grad_fn, 0) + size
    made = [node for node in by_node if node is not None]
    last = max(made, key=lambda node: order_of(node), default=None)
    early = sum(size for node, size in by_node.items() if node is not last)
    return Tangents(early, _of_a_loss(sizes), _of_a_loss(sizes, _USUAL)) if any(sizes) else Tangents()


def tangents_of_graph(program: Program) -> Tangents:
    """The gradients that backward of a captured graph begins with, where it is the whole call; as `tangents_of`."""
    tangents = _tangents(program)
    if any(value.numel() == 1 for value in tangents):  # a loss, beside which outputs are looked at
        return Tangents()
    sizes = [_size(value) for value in tangents]
    return Tangents(0, _of_a_loss(sizes), _of_a_loss(sizes, _USUAL)) if any(sizes) else Tangents()


def largest_output(program: Program) -> str:
    """The largest result of forward that has a gradient, in words: its type, its bytes and its line; empty without one.

    Args:
        program: a training program as captured.
    """
    wanted = {tuple(value.shape) for value in _tangents(program)}
    found = [(node, value) for node in program.output_nodes[: program.forward_outputs] for value in tensors_of(node)]
    node, value = max(
        ((node, value) for node, value in found if tuple(value.shape) in wanted and value.numel() > 1),
        key=lambda item: _size(item[1]),
        default=(None, None),
    )
    if node is None or value is None:
        return ""
    kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    size, line = format_bytes(_size(value), short=True), source_line(node)
    return f"{kind} ({size}{f', {line}' if line else ''})"


def _tangents(program: Program) -> list[torch.Tensor]:
    nodes = zip(program.inputs, program.placeholders, strict=True)
    return [value for entry, node in nodes if entry.kind is InputKind.TANGENT for value in tensors_of(node)]


def _size(value: torch.Tensor) -> int:
    return 0 if value.numel() == 1 else allocated_bytes(value.numel() * value.element_size(), value.device)


def _of_a_loss(sizes: Sequence[int], values: int = _OF_A_LOSS) -> int:
    return sum(sizes) + values * max(sizes) + _SCALARS
