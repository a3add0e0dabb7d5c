"""Which gradients of a model hooks use and drop within backward: by the hooks, and by what backward leaves."""

from __future__ import annotations

from torch import nn

from memopt.memory.hand_over import hooked_names

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
