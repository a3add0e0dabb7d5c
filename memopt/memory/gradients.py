"""Whether a model holds gradients: asked before every step under a budget."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn

from memopt.torch_compat.modules import own_modules, own_parameters


class Gradients:
    """The gradients that a model's parameters have."""

    def __init__(self, model: nn.Module) -> None:
        """Nothing is looked at yet."""
        self._model = model
        self._met: Callable[[], nn.Parameter | None] = _nothing  # the parameter whose gradient was found last

    def likely(self) -> bool:
        """A guess at `exist`, by a single parameter."""
        met = self._met()
        return met is not None and met.grad is not None

    def exist(self) -> bool:
        """Whether a parameter has one, that of a module or parameter that was added just now too."""
        found = _first(self._model)
        if found is not None and self._met() is not found:
            self._met = weakref.ref(found)
        return found is not None


def _first(model: nn.Module) -> nn.Parameter | None:
    """The first parameter that has a gradient.

    One plain loop over what modules keep, as this is asked in every step: `parameters` looks for names and repetitions,
    and takes several times as long.
    """
    modules: list[nn.Module | None] = [model]
    for module in modules:  # which grows as it is gone through
        if module is None:
            continue
        if parameters := own_parameters(module):
            for parameter in parameters.values():
                if parameter is not None and parameter.grad is not None:
                    return parameter
        if inner := own_modules(module):
            modules.extend(inner.values())
    return None


def _nothing() -> None:
    return None
