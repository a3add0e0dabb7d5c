"""What modules have as attributes, found in one pass over them: it is asked for before each call of several graphs."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from memopt.torch_compat.modules import OF_COMPILER, own_buffers, own_parameters

NUMBERS = frozenset({bool, int, float, complex, str, bytes, type(None)})
# Of these nothing is to be set back.
FIXED = NUMBERS | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, type(torch.ops.aten)}
_OF_MODULES = tuple(vars(nn.Module()))
PARTS = frozenset(_OF_MODULES) | OF_COMPILER
HOOKS = tuple(name for name in _OF_MODULES if "forward" in name or "backward" in name or "hooks" in name)
_hooks_of = operator.itemgetter(*HOOKS)


class ModuleAttributes(NamedTuple):
    """The attributes of one module.

    Attributes:
        module: whose they are.
        kind: its class, as a lazy module becomes another one.
        held: where the module has them.
        known: the same by name, as they are now.
        others: its own that are neither numbers nor anything else that never changes, with their names.
        hooks: the dictionaries of hooks that are not empty, with their names.
        buffers, parameters: that it has itself, by name.
    """

    module: nn.Module
    kind: type[nn.Module]
    held: dict[str, Any]
    known: dict[str, Any]
    others: list[tuple[str, Any]]
    hooks: list[tuple[str, Any]]
    buffers: Mapping[str, torch.Tensor | None]
    parameters: Mapping[str, nn.Parameter | None]


def attributes_of(modules: Iterable[nn.Module]) -> list[ModuleAttributes]:
    """Look at the attributes of modules: there are thousands, most of them numbers or empty."""
    found = []
    for module in modules:
        held = module.__dict__
        # Nearly always these come first, as `nn.Module` sets them before a class of the user's has set its own.
        own = itertools.islice(held.items(), len(_OF_MODULES), None) if _come_first(held) else held.items()
        others = [(name, value) for name, value in own if type(value) not in FIXED and name not in PARTS]
        hooks = []
        try:
            if any(values := _hooks_of(held)):
                hooks = [(name, value) for name, value in zip(HOOKS, values, strict=True) if value]
        except KeyError:  # a module of TorchScript
            hooks = [(name, value) for name in HOOKS if (value := held.get(name))]
        parts = own_buffers(module), own_parameters(module)
        found.append(ModuleAttributes(module, type(module), held, held.copy(), others, hooks, *parts))
    return found


def _come_first(held: dict[str, Any]) -> bool:
    """Whether torch's own attributes are the first, in their order: then the last of them is where it belongs."""
    return next(itertools.islice(held, len(_OF_MODULES) - 1, None), None) == _OF_MODULES[-1]
