"""Of which kind a call is: with gradients or without, and whether its backward adds to gradients that exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memopt.calls.guard_fast_path import FastPathCalls, FastPathGraph, Kind
from memopt.calls.several import SeveralCalls
from memopt.capture.caller import takes_loss_alone
from memopt.memory.gradients import Gradients
from memopt.torch_compat.saved_tensors import hooks_in_force


class Kinds:
    """Tells the kinds of one model's calls."""

    def __init__(
        self,
        gradients: Gradients,
        several: SeveralCalls,
        fast_path: FastPathCalls,
        *,
        budgeted: bool,
        planned: Callable[[Kind], bool] = lambda kind: False,
        hooked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take what the kind goes by.

        Args:
            gradients: whether the model's exist.
            several: which call of its step comes.
            fast_path: calls that go the guard fast path.
            budgeted: whether there is a budget: without one it does not matter whether gradients exist.
            planned: whether a step of training is planned for calls of a kind.
            hooked: whether hooks of the model see what it returns.
        """
        self._gradients, self._several, self._fast_path, self._budgeted = gradients, several, fast_path, budgeted
        self._planned, self._hooked = planned, hooked
        self._loss_alone = ""  # of the latest call with gradients
        self._trains = False  # whether there was a call with gradients: of inference nothing is looked at

    def alone(self) -> Kind:
        """The kind of a call that is all of its step, if it came now."""
        return Kind(torch.is_grad_enabled(), self._accumulating())

    def find(self, args: Any, kwargs: Any, latest: Kind | None) -> tuple[Kind, FastPathGraph | None]:
        """The kind of a call, and the graph that it would run; None where it must go the long way.

        Gradients are looked for after the guards were asked, where there are hardly any: those read the same memory
        in less time.

        Args:
            args, kwargs: of the call.
            latest: the kind of the call before it.
        """
        likely = torch.is_grad_enabled() and (self._gradients.likely() or hooks_in_force())
        kind = self._several.kind(
            torch.is_grad_enabled(), self._beside_gradients() or (likely and self._accumulating()), (args, kwargs)
        )
        kind = kind._replace(loss_alone=self._for_loss_alone(kind))
        # What is captured for other kinds of calls is to be given back first.
        fast_path = self._fast_path.find(kind, args, kwargs, early=not kind.gradients or kind == latest)
        if not likely and kind.gradients and self._accumulating():
            if fast_path is not None:
                fast_path.end()
            kind = kind._replace(accumulating=True)
            fast_path = self._fast_path.find(kind, args, kwargs, early=kind == latest)
        return kind, fast_path

    def _for_loss_alone(self, kind: Kind) -> str:
        """What the loss is taken by of a call that is planned for that alone; else empty.

        A call without gradients shares the plan of the latest with them. A plan for all that the model returns serves
        every caller, so where there is one it is not planned anew.
        """
        if not self._budgeted or not kind.alone:
            return ""
        if kind.gradients:
            found = None if self._hooked() else takes_loss_alone()
            use = "" if found is None else found.use
            serves = not self._planned(kind._replace(loss_alone=use)) and self._planned(kind)
            self._loss_alone = "" if serves else use
        return self._loss_alone

    def _beside_gradients(self) -> bool:
        """Whether a call without gradients runs beside those of a step of training, which it is planned with."""
        if not self._budgeted:
            return False
        if torch.is_grad_enabled():
            self._trains = True
            return False
        return self._trains and self._gradients.exist()

    def _accumulating(self) -> bool:
        """Whether gradients exist already, so that backward adds to them: that takes a plan of its own."""
        if not self._budgeted or not torch.is_grad_enabled():
            return False
        # A checkpoint around the model runs the call again within backward: by the same plan, whatever exists by then.
        return hooks_in_force() or self._gradients.exist()
