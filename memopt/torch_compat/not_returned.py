"""Tensors that stand for what is not made; tried on torch 2.11 and 2.13."""

from __future__ import annotations

import torch


class NotReturned(torch.Tensor):
    """Stands for an output that the caller cannot reach: on the meta device, so that no number can be read from it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def like(value: torch.Tensor) -> NotReturned:
        """One of the shape, strides and type of a tensor of fixed sizes."""
        shape, strides = tuple(value.shape), value.stride()
        return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta").as_subclass(NotReturned)
