"""Models made where and as they are used: the quickest way for large ones."""

from __future__ import annotations

from typing import Any

import torch

import memopt


def built(name: str, device: str, dtype: str, **changes: Any) -> Any:
    """A model of memopt.models with random weights, made on a device and in a dtype (`bfloat16`, say)."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            return memopt.models.build(name, **changes)
    finally:
        torch.set_default_dtype(usual)
