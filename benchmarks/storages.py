"""What Python's tensors hold on the CPU, storage by storage."""

from __future__ import annotations

import contextlib
import gc

import torch
from torch import nn


def storages(beside: frozenset[int] = frozenset()) -> dict[int, torch.UntypedStorage]:
    """All storages that Python's tensors show on the CPU, by address; without those beside."""
    gc.collect()
    found: dict[int, torch.UntypedStorage] = {}
    for item in gc.get_objects():
        if not issubclass(type(item), torch.Tensor):
            continue
        for tensor in (item, item.grad if item.is_leaf else None):
            if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type != "cpu":
                continue
            storage = tensor.untyped_storage()
            with contextlib.suppress(RuntimeError):  # torch 2.11 says so of what has no memory, as of traced tensors
                if storage.nbytes() and storage.data_ptr() not in beside:
                    found[storage.data_ptr()] = storage
    return found


def bytes_of(live: dict[int, torch.UntypedStorage]) -> int:
    """Of all these storages together."""
    return sum(storage.nbytes() for storage in live.values())
