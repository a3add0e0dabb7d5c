"""Operators of torch whose results keep more memory than their sizes say, and forms of them that do not.

They make a result in memory of another size and then give it its own size, which leaves the memory as it was: a mean of
squares in the place of all squares, folded columns in memory as large as the columns. Fake tensors show none of it.
All operators of PyTorch's own samples were compared (torch 2.13 on a CPU; CUDA has the same code): there are no others
that a program can hold, but for one number of `_embedding_bag`'s results.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memopt.graph.rewrite import Builder
from memopt.program import argument
from memopt.torch_compat.operators import OpOverload, schema_of

_aten = torch.ops.aten
REDUCED_IN_PLACE = frozenset(
    {
        _aten.binary_cross_entropy.default,
        _aten.mse_loss.default,
        _aten.smooth_l1_loss.default,
        _aten.soft_margin_loss.default,
    }
)
"""Losses of two tensors whose mean or sum is made in the unreduced loss's memory."""

_COPIED = {_aten.mse_loss.default, _aten.smooth_l1_loss.default}  # what is reduced is made a second time for it
_REDUCTIONS = {1: _aten.mean.default, 2: _aten.sum.default}  # as torch numbers them; 0 is none
# Made in memory of their operand's size, which stays where it is the larger; else it is let go of for a larger one.
_SIZED_AS_OPERAND = {_aten.im2col.default: _aten.im2col.out, _aten.col2im.default: _aten.col2im.out}


def write_out_reductions(graph: fx.Graph) -> None:
    """Write reduced losses out as the unreduced loss and its mean or sum, bitwise the same: torch computes them so.

    The number then has memory of its own, and the unreduced loss is let go of.

    Args:
        graph: edited; the values of the new nodes are not known yet.
    """
    for loss in REDUCED_IN_PLACE:
        for node in graph.find_nodes(op="call_function", target=loss):
            reduce = _REDUCTIONS.get(argument(node, "reduction"))
            if reduce is None:
                continue
            builder = Builder(node)
            names = [entry.name for entry in schema_of(loss).arguments]
            given = [0 if name == "reduction" else argument(node, name) for name in names]
            number = builder.call(reduce, builder.call(loss, *given))
            node.replace_all_uses_with(number)
            graph.erase_node(node)


@dataclasses.dataclass(frozen=True)
class IntoFresh:
    """An operator that is given an empty tensor as its out= argument, which it makes as large as its result."""

    overload: OpOverload

    def __call__(self, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the result, in memory of its own size."""
        return self.overload(first, *args, **kwargs, out=first.new_empty(0))

    def __str__(self) -> str:
        return f"{self.overload}_into_fresh"


@functools.cache
def as_run(target: Any) -> Callable[..., Any]:
    """What engines call for an operator that is not written over an operand: itself, or a form that keeps less."""
    sized = _SIZED_AS_OPERAND.get(target)
    return target if sized is None else IntoFresh(sized)


def taken_beside(target: Any, args: tuple[Any, ...], result: Any) -> tuple[int, int]:
    """Bytes that an operator takes in eager beside its result's storage on fake tensors.

    Args:
        target: any operator.
        args: its arguments by position, as a dispatch mode gets them.
        result: its result on them, fake or real.

    Returns:
        What the result keeps, and what is let go of again when it is made.
    """
    if target in _SIZED_AS_OPERAND:
        elements = args[0].numel()
    elif target in REDUCED_IN_PLACE:
        elements = math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))  # type: ignore[no-untyped-call]
    else:
        return 0, 0
    first, shown = elements * result.element_size(), int(result.untyped_storage().nbytes())
    if target in _SIZED_AS_OPERAND:
        return max(0, first - shown), first if first < shown else 0
    return max(0, first - shown), first if first > shown and target in _COPIED else 0
