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
    """The array's values as a tensor. Raises TypeError where PyTorch has no such type."""
    if isinstance(array, np.ndarray) and array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.ascontiguousarray(array).view(np.uint16)).view(torch.bfloat16)
    return torch.as_tensor(array)
