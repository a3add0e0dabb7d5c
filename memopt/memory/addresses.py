"""Where a model's tensors lie: what differs where it was moved or cast."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memopt.memory.reach import plain_tensors


def addresses(model: nn.Module) -> list[Any]:
    """Where the model's tensors lie, and as what."""
    tensors = [*model.parameters(), *model.buffers()]
    return [(_address(tensor), tensor.dtype, tensor.device, tensor.layout) for tensor in tensors]


def _address(tensor: torch.Tensor) -> Any:
    """What changes when a tensor's data is moved: of one without an address, nothing."""
    try:
        return [(part.data_ptr(), part.stride()) for part in plain_tensors(tensor)]
    except (RuntimeError, NotImplementedError):  # of a subclass or a layout that has none
        return id(tensor)
