"""Methods of a model beside `forward` that are called on its stand-in: they run eagerly, which is said."""

from __future__ import annotations

import functools
import logging
import types
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from memopt.memory.reach import shown_tensors

log = logging.getLogger("memopt")

# A method may find what it needs in a cache at first; each look has a hook on every module.
_LOOKS = 4


class OtherMethods:
    """Those of one model within a budget: `encode`, `get_features`, whatever runs its modules apart from its calls."""

    def __init__(self, model: nn.Module, notes: list[str]) -> None:
        """None was called yet; what is said is appended to these notes."""
        self._model, self._notes = model, notes
        self._looks: dict[str, int] = {}

    def watched(self, name: str, value: Any) -> Any:
        """The same attribute of the model; a method that is not known yet is looked at as it runs."""
        known = name.startswith("_") or hasattr(nn.Module, name) or name in vars(self._model)
        method = isinstance(value, types.MethodType) and value.__self__ is self._model
        if known or not method or self._looks.get(name, 0) >= _LOOKS:
            return value
        function = value.__func__

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            return self._looked_at(name, function, args, kwargs)

        return types.MethodType(watched, self._model)

    def _looked_at(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        self._looks[name] = self._looks.get(name, 0) + 1
        parts, ran = {id(part) for part in self._model.modules()}, False

        def runs(module: nn.Module, _: Any) -> None:
            nonlocal ran
            ran = ran or id(module) in parts

        hook = register_module_forward_pre_hook(runs)
        try:
            found = function(*args, **kwargs)
        finally:
            hook.remove()
        # Functions of the weights: what comes of inputs alone has gradients if those have.
        if ran or (_trained(found) and not _trained((args[1:], kwargs))):
            self._say(name)
        return found

    def _say(self, name: str) -> None:
        self._looks[name] = _LOOKS
        line = (
            f"{type(self._model).__name__}.{name} runs eagerly: beside the model's own calls it counts in a budget in "
            "bytes, alone it is held to none; to have it planned, memopt.compile a module whose forward calls it"
        )
        log.warning("memopt: %s", line)
        self._notes.append(line)


def _trained(values: Any) -> bool:
    return any(tensor.requires_grad for tensor in shown_tensors(values))
