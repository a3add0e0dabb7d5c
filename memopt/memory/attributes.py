"""What a model's modules hold as plain attributes: objects, and tensors that are neither parameters nor buffers."""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memopt.torch_compat import pytree

_NO_OBJECT = (nn.Module, torch.Tensor, type, types.FunctionType, types.MethodType, types.ModuleType, logging.Logger)
_PARTS = frozenset({"_parameters", "_buffers", "_modules"})
_CONTAINERS = (list, tuple, dict)


def objects_of(model: nn.Module) -> list[Any]:
    """The plain objects that a model's modules hold as attributes, each once: a configuration, a cache, a counter."""
    found = {id(value): value for module in model.modules() for value in vars(module).values() if is_object(value)}
    return list(found.values())


def held_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that a model holds beside its parameters and buffers, such as a state of the call before.

    With their gradients, which `retain_grad` keeps.
    """
    counted = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for part in (*model.modules(), *objects_of(model)):
        for name, value in vars(part).items():
            shown = value if isinstance(value, (torch.Tensor, *_CONTAINERS)) and name not in _PARTS else ()
            for leaf in pytree.tree_leaves(shown):
                if isinstance(leaf, torch.Tensor) and id(leaf) not in counted:
                    yield leaf
                    if (leaf.is_leaf or leaf.retains_grad) and leaf.grad is not None:
                        yield leaf.grad


def is_object(value: Any) -> bool:
    """Whether a value is a plain object with attributes."""
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, _NO_OBJECT)
