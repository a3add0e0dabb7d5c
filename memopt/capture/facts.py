"""What a call's tensors are beside their values: dtypes, shapes, strides, gradients, and which share memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from memopt.torch_compat.storages import storage_id


class Facts(NamedTuple):
    """What a tensor that a call returns is, beside its values.

    Attributes:
        dtype, shape: of the tensor.
        strides: of its dimensions that are longer than one.
        requires_gradient: whether it does.
    """

    dtype: torch.dtype
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    requires_gradient: bool


def facts_of(tensor: torch.Tensor) -> Facts:
    """What a tensor is beside its values."""
    strides = tensor.stride() if tensor.layout is torch.strided and tensor.numel() else ()
    return Facts(
        tensor.dtype,
        tuple(tensor.shape),
        tuple(stride for stride, size in zip(strides, tensor.shape, strict=False) if size > 1),
        tensor.requires_grad,
    )


def other_fact(name: str, expected: Facts, found: Facts) -> str | None:
    """What a tensor is otherwise than expected, in one line; None where nothing is."""
    for field, a, b in zip(Facts._fields, expected, found, strict=True):
        if a != b and field == "requires_gradient":
            return (
                f"{name} {'requires a' if b else 'has no'} gradient, and {'has none' if b else 'has one'} in the model"
            )
        if a != b:
            return f"{name} has {field} {b}, and {a} in the model"
    return None


def shared_memory(tensors: Mapping[str, torch.Tensor]) -> frozenset[tuple[str, str]]:
    """Pairs of tensors that overlap in memory, by name; tensors side by side in one block do not."""
    places = {name: _place(tensor) for name, tensor in tensors.items()}
    return frozenset((a, b) for a, b in itertools.combinations(places, 2) if _overlap(places[a], places[b]))


def other_sharing(expected: frozenset[tuple[str, str]], found: frozenset[tuple[str, str]]) -> str | None:
    """Which tensors share memory otherwise than expected, in one line; None where none do."""
    for a, b in sorted(expected ^ found):
        shared = (a, b) in expected
        return (
            f"{a} and {b} share {'no memory' if shared else 'memory'}, and {'do' if shared else 'do not'} in the model"
        )
    return None


def _place(tensor: torch.Tensor) -> tuple[Any, Any, Any] | None:
    """The storage, and the bytes in it from first to last; None of what has no such place."""
    try:
        if tensor.layout is not torch.strided or not tensor.numel():
            return None
        first = tensor.storage_offset() * tensor.element_size()
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return storage_id(tensor), first, first + (steps + 1) * tensor.element_size()
    except (NotImplementedError, RuntimeError):
        return None


def _overlap(a: tuple[Any, Any, Any] | None, b: tuple[Any, Any, Any] | None) -> bool:
    return a is not None and b is not None and bool(a[0] == b[0] and a[1] < b[2] and b[1] < a[2])
