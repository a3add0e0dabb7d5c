"""Several models that share one budget: their stand-ins, in the container that the models came in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from memopt.calls.group import Group
from memopt.memory.optimizer import is_optimizer
from memopt.memory.optimizers import holds_some, listed
from memopt.module import CompiledModule, compilable
from memopt.options import Options


def compile_together(
    models: Sequence[Any] | Mapping[Any, Any], optimizer: Any, options_of: Callable[[nn.Module, Any], Options]
) -> Any:
    """Stand-ins of several models that share a budget, in a list, a tuple or a dict as these.

    Args:
        models: to compile.
        optimizer: what steps their parameters, as `memopt.compile` takes it: one may step several models.
        options_of: what is asked for one model, with its optimizers or None.

    Raises:
        TypeError: one is no module, or there are none.
        ValueError: an optimizer holds no parameter of any, or a model is there twice.
    """
    given = list(models.values()) if isinstance(models, Mapping) else list(models)
    if not given:
        raise TypeError("memopt.compile takes a torch.nn.Module, or several: there are none")
    found = [compilable(model) for model in given]
    alone = [model for model, _ in found]
    if len({id(model) for model in alone}) < len(alone):
        raise ValueError("a model is given twice: one stand-in may be called several times in a step")
    group, every, made = Group(alone, optimizer), listed(optimizer), []
    for model, notes in found:
        own = [item for item in every if not is_optimizer(item) or holds_some(item, list(model.parameters()))]
        asked = options_of(model, own or None)
        made.append(CompiledModule(model, dataclasses.replace(asked, notes=(*asked.notes, *notes)), group))
    if isinstance(models, Mapping):
        return dict(zip(models, made, strict=True))
    return tuple(made) if isinstance(models, tuple) else made
