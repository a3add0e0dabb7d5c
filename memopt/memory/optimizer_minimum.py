"""The minimum that the state of optimizers takes, known of a parameter of each kind: a step of all takes a second."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import optim

from memopt.memory.optimizer import OptimizerLike, optimizer_footprint

# Of torch's own, those whose state of a parameter goes by that parameter and their settings alone.
_EACH_ALONE = (
    *(optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
)


def minimum_state_bytes(
    optimizers: Sequence[OptimizerLike], parameters: Iterable[torch.Tensor], target: torch.device | None = None
) -> int:
    """Bytes that the state of these optimizers takes at least, once each parameter was stepped.

    Args:
        optimizers: instances or what makes them; those that are not torch's own count as nothing.
        parameters: the tensors that will have gradients; those that require none are ignored.
        target: count as if they lay on this device.
    """
    trained = {id(p) for p in parameters if p.requires_grad and type(p) in (torch.Tensor, torch.nn.Parameter)}
    found = 0
    for item in optimizers:
        if isinstance(item, optim.Optimizer) and type(item) in _EACH_ALONE:
            for group in item.param_groups:
                found += _of_group(type(item), group, trained, target)
    return found


def _of_group(kind: Any, group: Mapping[str, Any], trained: set[int], target: torch.device | None) -> int:
    found: dict[Any, torch.Tensor] = {}
    counts = Counter[Any]()
    for parameter in group["params"]:
        if id(parameter) in trained:
            key = parameter.shape, parameter.dtype, parameter.device, parameter.stride()
            found.setdefault(key, parameter)
            counts[key] += 1
    settings = inspect.signature(kind).parameters.keys() & group.keys() - {"params"}
    make = functools.partial(kind, **{name: group[name] for name in settings})
    try:
        return sum(counts[key] * optimizer_footprint(make, [one], target).state_bytes for key, one in found.items())
    except ValueError:  # it is counted later, or refused with its reason
        return 0
