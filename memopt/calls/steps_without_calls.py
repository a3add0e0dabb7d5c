"""Optimizers that step on gradients of no call of the compiled model: what made them is planned by nobody, and said.

A part of the model may have been called by itself, `compiled.encoder(x)`, or the model that was given in its place.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from memopt.memory.reach import plain_tensors, storages_of
from memopt.memory.step_watch import StepWatch
from memopt.torch_compat.storages import version_of

log = logging.getLogger("memopt")


class StepsWithoutCalls:
    """Those of one model with a budget.

    Calls are counted of all compiled models of the process: gradients may come of one that shares weights with it.
    """

    def __init__(self, model: nn.Module, notes: list[str]) -> None:
        """No optimizer has stepped; what is said is appended to these notes, once."""
        self._model, self._notes = model, notes
        # Of each optimizer, as it stepped last: how many calls there had been, and its first gradient.
        self._stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, _Gradient | None]] = (
            weakref.WeakKeyDictionary()
        )
        self._since = _calls.count
        _watch.add(self)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, and has not let go of its gradients yet."""
        trained = (each for group in optimizer.param_groups for each in group["params"] if each.grad is not None)
        first = next(trained, None)
        calls, last = self._stepped.get(optimizer, (self._since, None))
        now = None if first is None else _Gradient(first.grad)
        self._stepped[optimizer] = _calls.count, now
        if calls != _calls.count or first is None or now is None or (last is not None and now.is_still(last)):
            return
        own = {id(parameter) for parameter in self._model.parameters()}
        # Some step on zeros first, for the state that is made then.
        if any(id(each) in own and not _is_zero(each.grad) for each in (first, *trained)):
            self._say()

    def stop(self) -> None:
        """The model is trained eagerly from now on, or it was said."""
        _watch.remove(self)

    def _say(self) -> None:
        self.stop()
        line = (
            f"an optimizer of {type(self._model).__name__} has stepped on gradients that came without a call of the "
            "compiled model: a part that was called by itself, or the model that was given, is held to no budget; call "
            "the compiled model, or memopt.compile the part"
        )
        log.warning("memopt: %s", line)
        self._notes.append(line)


class _Gradient:
    """A gradient at a moment: its memory, which is not held, and how often that was written to."""

    def __init__(self, gradient: torch.Tensor) -> None:
        parts = [part for part in plain_tensors(gradient) if not part.is_inference()]
        # A weak reference to the tensor itself would be in the way of `torch.utils.swap_tensors`.
        storages: Any = map(StorageWeakRef, storages_of(parts).values())
        self._storages = list(storages)
        self._versions = [version_of(part) for part in parts]

    def is_still(self, other: _Gradient) -> bool:
        return self._storages == other._storages and self._versions == other._versions


def _is_zero(gradient: torch.Tensor) -> bool:
    values = (part for part in plain_tensors(gradient) if part.is_floating_point() or part.is_complex())
    return not any(bool(part.any()) for part in values)


class _Calls:
    count = 0  # of all compiled models, with gradients enabled


def count_call() -> None:
    """A compiled model is called."""
    if torch.is_grad_enabled():
        _calls.count += 1


def _after_step(optimizer: torch.optim.Optimizer) -> None:
    for owner in _watch:
        owner.after_step(optimizer)


_calls = _Calls()
_watch: StepWatch[StepsWithoutCalls] = StepWatch(_after_step)
