"""Tensors as numpy arrays and back, those of bfloat16 included, which numpy knows by ml_dtypes alone."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch


def to_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's values as an array on the host."""
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype is not torch.bfloat16:
        return np.asarray(plain.numpy())
    return plain.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)


def to_tensor(array: Any) -> torch.Tensor:
    """The array's values as a tensor, in the array's own memory where it can be written to.

    Raises:
        TypeError: PyTorch has no such type.
    """
    if not isinstance(array, np.ndarray):
        return torch.as_tensor(array)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
