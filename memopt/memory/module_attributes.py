"""What modules have as attributes, found in one pass over them: it is asked for before each call of several graphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from memopt.torch_compat.modules import OF_COMPILER

NUMBERS = frozenset({bool, int, float, complex, str, bytes, type(None)})
# Of these nothing is to be set back.
FIXED = NUMBERS | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, type(torch.ops.aten)}
_OF_MODULES = frozenset(vars(nn.Module()))
PARTS = _OF_MODULES | OF_COMPILER
# A flag that a first forward sets beside them would be set back, and the next forward register them once more.
HOOKS = frozenset(name for name in _OF_MODULES if "forward" in name or "backward" in name or "hooks" in name)


class ModuleAttributes(NamedTuple):
    """The attributes of one module.

    Attributes:
        module: whose they are.
        kind: its class, as a lazy module becomes another one.
        held: where the module has them.
        known: the same by name, as they are now.
        others: its own that are neither numbers nor anything else that never changes, with their names.
        hooks: the dictionaries of hooks that are not empty, with their names.
    """

    module: nn.Module
    kind: type[nn.Module]
    held: dict[str, Any]
    known: dict[str, Any]
    others: list[tuple[str, Any]]
    hooks: list[tuple[str, Any]]


def attributes_of(modules: Iterable[nn.Module]) -> list[ModuleAttributes]:
    """Look at the attributes of modules: there are thousands, most of them numbers or empty."""
    found = []
    for module in modules:
        held = module.__dict__
        others, hooks = [], []
        for name, value in held.items():
            if type(value) in FIXED:
                continue
            if name not in PARTS:
                others.append((name, value))
            elif value and name in HOOKS:
                hooks.append((name, value))
        found.append(ModuleAttributes(module, type(module), held, held.copy(), others, hooks))
    return found
