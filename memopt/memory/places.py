"""Where tensors lie in memory, asked of hundreds of them in every call."""

from __future__ import annotations

from typing import Any

import torch

from memopt.torch_compat.storages import same_places as same_places


def places_of(values: list[Any]) -> list[int]:
    """The addresses of tensors, 0 for what is none."""
    return [value.data_ptr() if isinstance(value, torch.Tensor) else 0 for value in values]
