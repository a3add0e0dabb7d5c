"""Whether a model holds gradients: asked before every step under a budget."""

from __future__ import annotations

import weakref

from torch import nn

from memopt.torch_compat.modules import held_by, own_modules, own_parameters


class Gradients:
    """The gradients that a model's parameters have."""

    def __init__(self, model: nn.Module) -> None:
        """Nothing is looked at yet."""
        self._model = model
        # Where the gradient that was found last is: a parameter with a weak reference could not be swapped.
        self._met: tuple[weakref.ref[nn.Module], str] | None = None

    def likely(self) -> bool:
        """A guess at `exist`, by a single parameter."""
        module = None if self._met is None else self._met[0]()
        met = None if module is None or self._met is None else held_by(module, self._met[1])
        return met is not None and met.grad is not None

    def exist(self) -> bool:
        """Whether a parameter has one, that of a module or parameter that was added just now too."""
        found = _first(self._model)
        if found is not None:
            self._met = weakref.ref(found[0]), found[1]
        return found is not None


def _first(model: nn.Module) -> tuple[nn.Module, str] | None:
    """The module, and the name in it, of the first parameter that has a gradient.

    One plain loop over what modules keep, as this is asked in every step: `parameters` looks for names and repetitions,
    and takes several times as long.
    """
    modules: list[nn.Module | None] = [model]
    for module in modules:  # which grows as it is gone through
        if module is None:
            continue
        if parameters := own_parameters(module):
            for name, parameter in parameters.items():
                if parameter is not None and parameter.grad is not None:
                    return module, name
        if inner := own_modules(module):
            modules.extend(inner.values())
    return None
