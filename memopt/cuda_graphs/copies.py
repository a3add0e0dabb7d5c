"""Tensors that stand for others: on the same memory without holding it, or copies in memory of their own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from memopt.cuda_graphs.aliases import address_of, storage_at, view


def unheld(values: Sequence[Any], but: Collection[int]) -> list[Any]:
    """Tensors on the same memory, which they do not hold, but for those at some addresses.

    A CUDA graph writes there, and reads, as it did.
    """
    storages: dict[int, Any] = {}
    return [
        value
        if not isinstance(value, torch.Tensor) or not value.untyped_storage().nbytes() or address_of(value) in but
        else view(storage_at(value, storages), value)
        for value in values
    ]


def copy(value: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own."""
    return like(value).copy_(value)


def like(value: torch.Tensor) -> torch.Tensor:
    """Memory for a copy of a tensor, of any values."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def copies_of(values: Sequence[Any]) -> list[Any]:
    """Copies in memory of the caller's; of equal tensors several in one launch."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        return list(values)
    made = [like(value) for value in tensors]
    torch._foreach_copy_(made, tensors)
    copies = iter(made)
    return [next(copies) if isinstance(value, torch.Tensor) else value for value in values]


def lying_as(values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Gradients laid out as their parameters are, as far as these are given: autograd would copy them once more.

    At the end of backward, there is room for it where the step's blocks were.
    """
    found = list(values)
    del values
    for place, of in enumerate(others[: len(found)]):
        value = found[place]
        if not isinstance(value, torch.Tensor) or not isinstance(of, torch.Tensor):
            continue
        dense = torch.empty_like(of, device="meta").stride() == of.stride()
        if dense and value.shape == of.shape and value.stride() != of.stride():
            found[place] = torch.empty_strided(of.shape, of.stride(), dtype=value.dtype, device=value.device)
            found[place].copy_(value)
    return found
