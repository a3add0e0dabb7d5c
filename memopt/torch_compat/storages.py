"""Which memory a tensor lies in, who else has it, and how often it was written to; tried on torch 2.11 and 2.13."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


def storage_id(tensor: torch.Tensor) -> int:
    """A number that a tensor shares with those in the same storage, and with no other while that is alive."""
    return int(tensor.untyped_storage()._cdata)


def id_of_storage(storage: torch.UntypedStorage) -> int:
    """The number that `storage_id` gives for tensors in this storage."""
    return int(storage._cdata)


def storage_users(storage: torch.UntypedStorage) -> int:
    """How many tensors and Python objects hold a storage: `storage` itself is one of them."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements of memory from the first to the last that a layout reaches; 0 where it has none."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor's memory was written to, as autograd counts: views share the count.

    Raises:
        RuntimeError: a tensor of inference mode has no count.
    """
    return int(tensor._version)


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Say that a tensor's memory is what it was when `version_of` gave that number; tried on 2.13."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def is_tracked_view(tensor: torch.Tensor) -> bool:
    """Whether autograd takes a tensor for a view of another one, through whose history its gradients go."""
    return bool(tensor._is_view())


def _one_by_one(values: list[Any], places: list[int], indices: list[int]) -> bool:
    return all(values[index].data_ptr() == places[index] for index in indices)


# `same_places(values, places, indices)`: whether the tensors among values with these indices lie at these addresses.
# In three quarters of the time, where PyTorch is built with CUDA.
same_places: Callable[[list[Any], list[int], list[int]], bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _one_by_one
)
