"""Which gradients of a model are used within backward: dropped by hooks, reduced among ranks, or added to others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from memopt.memory.distributed import buckets_of
from memopt.memory.hand_over import hooked_names
from memopt.torch_compat.autograd_nodes import at_end_of_backward
from memopt.torch_compat.modules import hooks_after_accumulation, hooks_of_gradient
from memopt.torch_compat.storages import storage_id, version_of

_LOOKS = 16  # first calls in which hooks are looked for; later only ever more rarely

HELD = (
    "hooks of parameters get their gradients at the end of backward only, as code of Inductor's returns all together: "
    "backend='aten', or a budget that needs it, hands each over as soon as it is final"
)
KEPT = "hooks of parameters leave gradients where they are: these count until the end of backward"
WAIT = (
    "gradients that are to be added to existing ones wait for others of the same parameters (of a penalty on weights, "
    "say, that is computed before the model's call): they count until the end of backward"
)


class Hooked:
    """The parameters whose gradients are handed over in the middle of backward.

    Attributes:
        names: those whose gradients hooks use and drop, by their names in the model.
        reduced: those whose gradients DistributedDataParallel begins to reduce as soon as it has them.
        viewed: of these, those whose gradients it keeps in its buckets: what backward made is dropped then.
        kept: whether a backward left gradients of `names`: hooks that only look at gradients save nothing.
        waited: whether gradients that a backward gave to be added to existing ones were not added at once.
    """

    def __init__(self, model: nn.Module) -> None:
        """Look for hooks."""
        self.names = hooked_names(model)
        self.reduced = self.viewed = frozenset[str]()
        self.kept = self.waited = False
        self._calls, self._planned_for = 0, False  # of `waited`, what is known to who asks whether something changed

    @property
    def gone(self) -> frozenset[str]:
        """Those whose gradients backward makes, and does not hold to its end."""
        return self.names | self.viewed

    @property
    def early(self) -> frozenset[str]:
        """Those whose gradients are wanted before the end of backward."""
        return self.names | self.reduced

    def notes(self, *, accumulating: bool) -> list[str]:
        """What is to be said of steps, whose gradients are added to existing ones or are not."""
        return [KEPT] * self.kept + [WAIT] * (self.waited and accumulating)

    def keeps(self) -> None:
        """A backward has left gradients of these parameters."""
        self.kept = True

    def waits(self) -> None:
        """Gradients that were to be added to existing ones wait for others."""
        self.waited = True

    def changed(self, model: nn.Module) -> bool:
        """Whether other gradients are handed over from now on, as hooks came or went, or leave them; before a call."""
        if self.waited and not self._planned_for:
            self._planned_for = True
            return True
        self._calls += 1
        if self._calls > _LOOKS and self._calls & (self._calls - 1) and not self.kept:
            return False
        before = self.names, self.reduced, self.viewed
        self.names = frozenset[str]() if self.kept else hooked_names(model)
        buckets = buckets_of(model)
        if buckets.reduced:  # an evaluation may leave DistributedDataParallel out
            named = [(name, id(parameter)) for name, parameter in model.named_parameters()]
            self.reduced = frozenset(name for name, key in named if key in buckets.reduced)
            self.viewed = frozenset(name for name, key in named if key in buckets.viewed)
        return (self.names, self.reduced, self.viewed) != before


@dataclasses.dataclass(frozen=True)
class EarlyGradients:
    """Whose gradients the calls of one kind hand over in the middle of backward.

    Attributes:
        hooked: the parameters whose gradients are wanted by then.
        added: names of those whose gradients autograd adds to existing ones, in place: the new one is gone then.
    """

    hooked: Hooked
    added: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class ToBeGone:
    """Inputs whose gradients are to be gone once they were handed over, by place, and what is called where they stay.

    Attributes:
        dropped: those that hooks are to drop.
        keeps: called when backward has ended, and hooks have left some of them.
        added: those that autograd is to add to existing ones.
        waits: called when the next ones are asked for, and some of them are still there.
    """

    dropped: Sequence[int]
    keeps: Callable[[], None]
    added: Collection[int]
    waits: Callable[[], None]


def added_names(model: nn.Module) -> frozenset[str]:
    """The first names of the parameters whose gradients exist and are dense: backward adds to these in place."""
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and type(parameter.grad) is torch.Tensor and parameter.grad.layout is torch.strided
    )


def early_gradients(model: nn.Module, hooked: Hooked, *, alone: bool, accumulating: bool) -> EarlyGradients | None:
    """Whose gradients calls of a kind hand over within backward; None where others of the step add to them.

    Args:
        model: that is called.
        hooked: its parameters whose gradients are wanted by then.
        alone: whether a call's gradients are final in its own backward.
        accumulating: whether backward finds gradients to add to.
    """
    if not alone:
        return None
    return EarlyGradients(hooked, added_names(model) if accumulating and not hooked.waited else frozenset())


def spare(tensor: torch.Tensor) -> None:
    """In the backward that runs, let hooks of a tensor that gets no gradient from here alone.

    Eager's graph has no node that would call them. What other parts of the graph add is still theirs to see; what
    earlier backwards have left is not.
    """
    if hooks := hooks_of_gradient(tensor):
        _replace(hooks, _if_there)
    if hooks := hooks_after_accumulation(tensor):
        _replace(hooks, functools.partial(_if_added, _place_and_version(tensor.grad)))


def _replace(hooks: dict[int, Callable[..., Any]], by: Callable[..., Any]) -> None:
    before = dict(hooks)
    instead = {key: functools.partial(by, hook) for key, hook in before.items()}
    hooks.update(instead)

    def restore() -> None:
        hooks.update({key: hook for key, hook in before.items() if hooks.get(key) is instead[key]})

    at_end_of_backward(restore)


def _if_there(hook: Callable[..., Any], gradient: torch.Tensor | None) -> Any:
    return None if gradient is None else hook(gradient)


def _if_added(left: tuple[int, int] | None, hook: Callable[..., Any], parameter: torch.Tensor) -> None:
    if parameter.grad is not None and _place_and_version(parameter.grad) != left:
        hook(parameter)


def _place_and_version(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (storage_id(gradient), version_of(gradient))
