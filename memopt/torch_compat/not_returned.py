"""Tensors that stand for what is not made; tried on torch 2.11 and 2.13."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from memopt.torch_compat import pytree


class NotReturned(torch.Tensor):
    """Stands for an output that the caller cannot reach: on the meta device, so that no number can be read from it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def like(cls, value: torch.Tensor) -> NotReturned:
        """One of the shape, strides and type of a tensor of fixed sizes."""
        shape, strides = tuple(value.shape), value.stride()
        with unset_fake_temporarily():
            made = torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
        return torch.Tensor._make_subclass(cls, made)  # no view of it, which Dynamo would ask for


class Untouched(NotReturned):
    """Stands for an output that code between the graph and the caller passes on, and does nothing else with.

    Attributes:
        touches: how often something else was done all the same, with any of them.
    """

    touches = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Facts about it are given; what would make another tensor of it is refused.

        Raises:
            RuntimeError: it would be read.
        """
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(found)):
            return found
        Untouched.touches += 1
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} was called on an output that memopt has left out: when the call was "
            "planned, nothing but the loss was used of what the model returns; take it from a call without gradients, "
            "or compile the model after what uses it is switched on"
        )
