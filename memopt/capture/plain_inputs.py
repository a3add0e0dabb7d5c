"""Inputs of a class that only says what torch's functions do with it (`__torch_function__`): an image of torchvision's.

Dynamo traces what they do, so a graph needs none of it. A mode that AOTAutograd has in force in a graph's first call
refuses to go on where an operator is given one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memopt.torch_compat.dispatch import dispatches_itself


def plainly(run: Callable[..., Any]) -> Callable[..., Any]:
    """A graph's function, given the tensors that such inputs are: by its guards the same ones as in its first call."""
    places: list[int] | None = None

    def call(*args: Any) -> Any:
        nonlocal places
        if places is None:
            places = [place for place, value in enumerate(args) if _only_tells(value)]
        if not places:
            return run(*args)
        given = list(args)
        for place in places:
            given[place] = given[place].as_subclass(torch.Tensor)
        return run(*given)

    return call


def _only_tells(value: Any) -> bool:
    plain = not isinstance(value, torch.Tensor) or type(value) is torch.Tensor or isinstance(value, torch.nn.Parameter)
    return not plain and not dispatches_itself(type(value))
