"""Whether a model is a part of what its steps train: a cell that is called many times, a body under another's head.

What a fraction is of is known once a step was seen whole. Of a model that is all of its step, a call tells that; of a
part of it one does not, and a fraction of that call alone would be refused for nothing.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch import nn

from memopt.memory.optimizer import parameters_of
from memopt.torch_compat.modules import called_module


def is_part(owner: weakref.ref[nn.Module], optimizers: Callable[[], Sequence[Any]]) -> bool:
    """Whether a model that is being called is likely to be a part of what its step trains.

    Args:
        owner: the model.
        optimizers: gives those that step it, as far as they are known.
    """
    model = owner()
    if model is None:
        return False
    if isinstance(model, nn.RNNCellBase):
        return True
    own = {id(parameter) for parameter in model.parameters()}
    others = (parameter for each in optimizers() for parameter in parameters_of(each))
    return any(id(parameter) not in own for parameter in others) or _is_called_by_another(model)


def _is_called_by_another(model: nn.Module) -> bool:
    """Whether a module is called that is neither the model, nor a part of it, nor its stand-in."""
    parts = {id(each) for each in model.modules()}
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        here = called_module(frame)
        if here is not None and id(here) not in parts and not _stands_for(here, model):
            return True
        frame = frame.f_back
    return False


def _stands_for(module: nn.Module, model: nn.Module) -> bool:
    return getattr(vars(module).get("_memopt"), "model", None) is model
