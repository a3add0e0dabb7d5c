"""A program as if it ran on a device that this machine may not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memopt.graph.propagation import fake_mode
from memopt.program import Program
from memopt.torch_compat.storages import id_of_storage


def first_of(device_type: str) -> torch.device:
    """The device that stands for one of this type which need not be here."""
    return torch.device(device_type) if device_type == "cpu" else torch.device(device_type, 0)


def moved(program: Program, device_type: str) -> Program:
    """Return the program with all tensors on another kind of device, to be counted and planned, never to be run.

    Operators, layouts and roles stay as they were captured; `state` keeps the real tensors where they are. Inputs that
    share a storage still do. A program that is there already is returned as it is.
    """
    device = first_of(device_type)
    inputs = [node.meta["val"] for node in program.placeholders]
    if all(tensor.device.type == device_type for tensor in inputs if isinstance(tensor, torch.Tensor)):
        return program
    new = program.copy()
    storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    mode = fake_mode(program.graph_module)
    with mode, torch.no_grad():
        for node in new.placeholders:
            if isinstance(node.meta["val"], torch.Tensor):
                node.meta["val"] = _twin(node.meta["val"], device, storages)
    for node in new.calls:
        node.args = _elsewhere(node.args, device)
        node.kwargs = _elsewhere(node.kwargs, device)
    return new.finish()


def _twin(
    tensor: torch.Tensor, device: torch.device, storages: dict[tuple[int, torch.dtype], torch.Tensor]
) -> torch.Tensor:
    """A fake tensor of the same layout on the device, in the twin of the tensor's storage."""
    storage = tensor.untyped_storage()
    key = id_of_storage(storage), tensor.dtype
    if key not in storages:
        elements = storage.nbytes() // tensor.element_size()
        storages[key] = torch.empty(elements, dtype=tensor.dtype, device=device)
    return storages[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _elsewhere(arguments: Any, device: torch.device) -> Any:
    """The arguments with each device in them replaced."""
    return fx.node.map_aggregate(arguments, lambda value: device if isinstance(value, torch.device) else value)
