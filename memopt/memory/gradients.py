"""Whether a model holds gradients: asked before every step under a budget."""

from __future__ import annotations

from torch import nn


def holds_gradients(model: nn.Module) -> bool:
    """Whether a parameter of the model has a gradient, that of a module or parameter that was added just now too.

    One plain loop over what modules keep, as this is asked in every step: `parameters` looks for names and repetitions,
    and takes several times as long.
    """
    modules: list[nn.Module | None] = [model]
    for module in modules:  # which grows as it is gone through
        if module is None:
            continue
        if module._parameters:
            for parameter in module._parameters.values():
                if parameter is not None and parameter.grad is not None:
                    return True
        if module._modules:
            modules.extend(module._modules.values())
    return False
