"""Which tensors optimizers have stepped: fused ones, and those of libraries, write to them without a new version."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from memopt.memory.step_watch import StepWatch

_last: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # steps of all by its last
_steps = [0]


def watch_steps(owner: Any) -> int:
    """See the steps of all optimizers for as long as the owner lives; return how many were seen so far."""
    _watch.add(owner)
    return _steps[0]


def steps_seen() -> int:
    """How many steps of optimizers were seen so far."""
    return _steps[0]


def stepped_since(steps: int, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a step since then was one of an optimizer that holds memory of one of these tensors."""
    optimizers = [optimizer for optimizer, last in list(_last.items()) if last > steps]
    held = {place for item in optimizers for group in item.param_groups for place in _places(group["params"])}
    return bool(held) and not held.isdisjoint(_places(tensors))


def _places(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    for tensor in tensors:
        with contextlib.suppress(
            RuntimeError, NotImplementedError, AttributeError
        ):  # of subclasses without one storage
            yield tensor.untyped_storage().data_ptr()


def _after_step(optimizer: torch.optim.Optimizer) -> None:
    _steps[0] += 1
    with contextlib.suppress(TypeError):  # of a class without weak references
        _last[optimizer] = _steps[0]


_watch: StepWatch[Any] = StepWatch(_after_step)  # of what is compiled there is no need: it counts versions itself
