"""All optimizers of one model together: what a user may give for them, and what they hold and take."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from memopt.memory.optimizer import (
    OptimizerFootprint,
    OptimizerLike,
    UncountedError,
    is_optimizer,
    name_of,
    optimizer_footprint,
    parameters_of,
    state_bytes,
)
from memopt.memory.reach import optimizers_in

NONE = OptimizerFootprint(0, 0, 0)
_TAKES = "one optimizer, a list of them, or a class or function that makes one of a list of parameters"
_SETTINGS = (bool, int, float, str, type(None))


@dataclasses.dataclass(frozen=True)
class Counted:
    """What optimizers hold and take, as far as it can be known.

    Attributes:
        footprint: of all of them; each steps by itself.
        later: names of those whose state, or a part of it, is known only after their first step.
    """

    footprint: OptimizerFootprint
    later: tuple[str, ...] = ()


def listed(given: Any) -> tuple[OptimizerLike, ...]:
    """What a user gave as `optimizer`, one by one; empty for None.

    Of what only holds optimizers, as their schedulers and some wrappers do, those count that it leads to. In containers
    settings may lie beside them, as in what Lightning's `configure_optimizers` returns.

    Raises:
        TypeError: something else than an optimizer, what holds one, or what makes one is among it.
    """
    if given is None:
        return ()
    if isinstance(given, (list, tuple, set, Mapping)):
        elements = list(given.values()) if isinstance(given, Mapping) else list(given)
        if isinstance(given, Mapping) and any(map(_leads, elements)):
            elements = [element for element in elements if not isinstance(element, _SETTINGS)]
        if not elements:
            raise TypeError(f"optimizer is empty: it takes {_TAKES}")
        found = [item for element in elements for item in _of_element(element)]
    else:
        found = list(_one(given))
    inside = {id(inner) for item in found if is_optimizer(item) for inner in _inner(item)}
    return tuple({id(item): item for item in found if id(item) not in inside}.values())


def _of_element(element: Any) -> tuple[OptimizerLike, ...]:
    if element is None:
        raise TypeError(f"optimizer takes {_TAKES}, not None among others")
    return listed(element)


def _leads(value: Any) -> bool:
    """Whether a value is an optimizer, or holds or makes one."""
    try:
        return bool(listed(value))
    except TypeError:
        return False


def _one(given: Any) -> tuple[OptimizerLike, ...]:
    if is_optimizer(given):
        return (given,)
    if isinstance(given, type):
        if issubclass(given, torch.optim.Optimizer):
            return (given,)
        raise TypeError(f"optimizer takes {_TAKES}, not the class {given.__name__}")
    makes = (functools.partial, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
    if isinstance(given, makes):
        return (given,)
    if inner := _outermost(given):
        return tuple(inner)
    if callable(given) and not isinstance(given, (torch.Tensor, torch.nn.Module)):
        return (given,)
    raise TypeError(f"optimizer takes {_TAKES}, not {type(given).__name__}")


def count(
    optimizers: Sequence[OptimizerLike],
    parameters: Iterable[torch.Tensor],
    target: torch.device | None = None,
) -> Counted:
    """Count optimizers together: what wraps others counts for what it and they hold.

    Args:
        optimizers: as `listed` returns them.
        parameters: the tensors that will have gradients; those that require none are ignored.
        target: as for `optimizer_footprint`.

    Raises:
        ValueError: one of them holds none of the parameters, or cannot be made of them.
    """
    parameters = [*parameters]
    return together([_count(item, parameters, target) for item in optimizers])


def together(found: Sequence[Counted]) -> Counted:
    """The same of several optimizers that step one after another."""
    return Counted(
        OptimizerFootprint(
            sum(item.footprint.state_bytes for item in found),
            sum(item.footprint.existing_state_bytes for item in found),
            max((item.footprint.step_peak_bytes for item in found), default=0),
        ),
        tuple(dict.fromkeys(name for item in found for name in item.later)),
    )


def holding(found: Counted, size: int) -> Counted:
    """The same of an optimizer that was seen to hold so many bytes after a step."""
    footprint = found.footprint
    seen = dataclasses.replace(
        footprint, state_bytes=max(footprint.state_bytes, size), existing_state_bytes=max(0, size)
    )
    return Counted(seen)


def _count(optimizer: OptimizerLike, parameters: Sequence[torch.Tensor], target: torch.device | None) -> Counted:
    if is_optimizer(optimizer) and was_given_some(optimizer, parameters) and not holds_some(optimizer, parameters):
        return _frozen(optimizer, parameters)
    inner = [item for item in _inner(optimizer) if holds_some(item, parameters)]
    parts = [_alone(item, parameters, target) for item in inner]
    own = _alone(optimizer, parameters, target)
    every = [own, *parts]
    state = max(own.footprint.state_bytes, sum(part.footprint.state_bytes for part in parts))
    existing = max(own.footprint.existing_state_bytes, sum(part.footprint.existing_state_bytes for part in parts))
    temporaries = max(item.footprint.step_peak_bytes for item in every)
    return Counted(OptimizerFootprint(max(state, existing), existing, temporaries), own.later)


def _frozen(optimizer: Any, parameters: Sequence[torch.Tensor]) -> Counted:
    """One whose parameters are not trained for now: it holds what it does, and steps nothing."""
    size = state_bytes(optimizer, parameters, parameters[0].device)
    return Counted(OptimizerFootprint(size, size, 0))


def _alone(optimizer: OptimizerLike, parameters: Sequence[torch.Tensor], target: torch.device | None) -> Counted:
    """One optimizer; with what it holds by now where a step of a copy tells nothing."""
    try:
        return Counted(optimizer_footprint(optimizer, parameters, target))
    except UncountedError:
        name = name_of(optimizer)
        if not is_optimizer(optimizer):
            return Counted(NONE, (name,))
        device = next(p.device for p in parameters if p.requires_grad)
        existing = state_bytes(optimizer, parameters, device)
        return Counted(OptimizerFootprint(existing, existing, 0), (name,))


def _inner(optimizer: OptimizerLike) -> list[Any]:
    """The outermost of the optimizers that a wrapper holds: what those hold counts with them."""
    return _outermost(optimizer) if is_optimizer(optimizer) else []


def _outermost(root: Any) -> list[Any]:
    """The optimizers that an object leads to, without itself and those that another of them leads to."""
    found, covered = [], {id(root)}
    for item in optimizers_in(root):
        if id(item) not in covered:
            found.append(item)
            covered.update(map(id, optimizers_in(item)))
    return found


def holds_some(optimizer: Any, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether an optimizer steps some of these parameters that are trained."""
    return was_given_some(optimizer, [p for p in parameters if p.requires_grad])


def was_given_some(optimizer: Any, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether an optimizer was given some of these parameters, trained or not."""
    known = set(map(id, parameters))
    return any(id(p) in known for p in parameters_of(optimizer))
