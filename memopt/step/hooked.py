"""Which gradients of a model hooks use and drop within backward: by the hooks, and by what backward leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from memopt.memory.hand_over import hooked_names
from memopt.torch_compat.autograd_nodes import at_end_of_backward
from memopt.torch_compat.modules import hooks_after_accumulation

_LOOKS = 16  # first calls in which hooks are looked for; later only ever more rarely

HELD = (
    "hooks of parameters get their gradients at the end of backward only, as code of Inductor's returns all together: "
    "backend='aten', or a budget that needs it, hands each over as soon as it is final"
)
KEPT = "hooks of parameters leave gradients where they are: these count until the end of backward"


class Hooked:
    """The parameters whose gradients are handed over to hooks in the middle of backward, and not held to its end.

    Attributes:
        names: their names in the model.
        kept: whether a backward left gradients of theirs: hooks that only look at gradients save nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        """Look for hooks."""
        self.names = hooked_names(model)
        self.kept = False
        self._calls = 0

    def keeps(self) -> None:
        """A backward has left gradients of these parameters."""
        self.kept = True

    def changed(self, model: nn.Module) -> bool:
        """Whether other gradients are handed over from now on, as hooks came or went, or leave them; before a call."""
        self._calls += 1
        if self._calls > _LOOKS and self._calls & (self._calls - 1) and not self.kept:
            return False
        names = frozenset[str]() if self.kept else hooked_names(model)
        before, self.names = self.names, names
        return names != before


def spare(parameter: torch.Tensor) -> None:
    """In the backward that runs, let hooks of a parameter that gets no gradient from here alone.

    Eager's graph has no node that would call them. What other parts of the graph add is still theirs to see.
    """
    hooks = hooks_after_accumulation(parameter)
    if not hooks:
        return
    before = dict(hooks)
    instead = {key: functools.partial(_if_there, hook) for key, hook in before.items()}
    hooks.update(instead)

    def restore() -> None:
        hooks.update({key: hook for key, hook in before.items() if hooks.get(key) is instead[key]})

    at_end_of_backward(restore)


def _if_there(hook: Callable[[torch.Tensor], None], parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        hook(parameter)
