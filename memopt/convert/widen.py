"""A model whose weights are float16 or bfloat16, in float32: no number changes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from memopt.torch_compat import pytree
from memopt.torch_compat.modules import change_tensors

_NARROW = (torch.float16, torch.bfloat16)


def widened(
    model: torch.nn.Module, inputs: Mapping[str, Any], *, consume: bool
) -> tuple[torch.nn.Module, Mapping[str, Any]]:
    """The model and its inputs with every float16 and bfloat16 tensor in float32; as they are where there is none.

    Args:
        model: the module.
        inputs: keyword arguments.
        consume: whether the module's own weights may be replaced, one by one; else a copy's are.
    """
    if not any(value.dtype in _NARROW for value in (*model.parameters(), *model.buffers())):
        return model, inputs
    wide = model if consume else copy.deepcopy(model)
    change_tensors(wide, _wide)  # `float()` would narrow float64 as well
    return wide, pytree.tree_map(_wide, dict(inputs))


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _NARROW else value
