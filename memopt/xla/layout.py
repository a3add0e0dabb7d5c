"""In which order of their axes tensors lie in memory: XLA's arrays are dense, the last axis innermost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from memopt.xla.lower import Lowered

# The axes of a tensor from the outermost in memory to the innermost; None: as they are.
Order = tuple[int, ...] | None
IMAGES = (0, 2, 3, 1)  # channels innermost, as kernels of convolutions have them


def order_of(value: Any, *, free: bool = False, images: bool = False) -> Order:
    """The order in which a tensor is exchanged.

    Args:
        value: a fake tensor, or None for what is no tensor.
        free: whether it goes from one executable to another only, so that any order will do: the one of its strides
            even where it is a part of something else.
        images: whether what is free and has four axes is likely to be images: their channels go innermost.
    """
    if not isinstance(value, torch.Tensor) or not value.numel():
        return None
    if free and images and value.ndim == 4:
        return IMAGES
    strides = value.stride()
    order = tuple(sorted(range(value.ndim), key=lambda axis: strides[axis], reverse=True))
    if value.is_contiguous() or order == tuple(range(value.ndim)):
        return None
    return order if free or value.permute(order).is_contiguous() else None


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes another."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def laid_out(
    lowered: Lowered, arguments: Sequence[Order], results: Sequence[Order]
) -> tuple[Callable[..., list[Any]], list[jax.ShapeDtypeStruct | None]]:
    """The function on arrays whose axes are in these orders, and what it takes.

    Args:
        lowered: a graph as a JAX function.
        arguments: one order per placeholder; behind them there may be a key.
        results: one order per result.
    """
    shapes = lowered.arguments()
    orders = [*arguments, *([None] * (len(shapes) - len(arguments)))]

    def function(*given: Any) -> list[Any]:
        turned = [
            jnp.transpose(value, inverse(order)) if order else value for value, order in zip(given, orders, strict=True)
        ]
        found = lowered.function(*turned)
        return [jnp.transpose(value, order) if order else value for value, order in zip(found, results, strict=True)]

    return function, [
        jax.ShapeDtypeStruct(tuple(shape.shape[axis] for axis in order), shape.dtype) if order and shape else shape
        for shape, order in zip(shapes, orders, strict=True)
    ]
