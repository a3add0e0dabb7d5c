"""StepWatch: what is called after the steps of all optimizers, for as long as anybody watches them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

Owner = TypeVar("Owner")


class StepWatch(Generic[Owner]):
    """A hook of all optimizers' steps that is there while one of its owners lives; it holds none of them.

    Steps that are being compiled are not seen: what compiled code does is known otherwise.
    """

    def __init__(self, after_step: Callable[[torch.optim.Optimizer], None]) -> None:
        """Nobody watches yet; `after_step` is called with each optimizer that has stepped."""

        @functools.wraps(after_step)
        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not torch.compiler.is_compiling():
                after_step(optimizer)

        self._hook = hook
        self._owners: weakref.WeakSet[Owner] = weakref.WeakSet()
        self._handle: RemovableHandle | None = None

    @property
    def hooked(self) -> bool:
        """Whether torch calls the hook."""
        return self._handle is not None

    def add(self, owner: Owner) -> None:
        """Call the hook for as long as this owner lives too."""
        if owner in self._owners:
            return
        self._owners.add(owner)
        weakref.finalize(owner, self._gone).atexit = False
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._hook)

    def remove(self, owner: Owner) -> None:
        """Do not call the hook for this owner any more."""
        self._owners.discard(owner)
        self._gone()

    def __iter__(self) -> Iterator[Owner]:
        """The owners that live, as they are now."""
        return iter(list(self._owners))

    def _gone(self) -> None:
        if next(iter(self._owners), None) is None:  # its length still counts those that go in the same collection
            handle, self._handle = self._handle, None
            if handle is not None:
                handle.remove()
