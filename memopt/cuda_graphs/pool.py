"""The memory that CUDA graphs of one model's steps lie in, one step's at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memopt.cuda_graphs.aliases import AliasedOutputs
from memopt.solve.placement import Placements

if TYPE_CHECKING:
    from memopt.cuda_graphs.step import CudaGraphStep

# CUDA graphs that are forgotten after fewer steps were not worth making: of steps that take turns, or between calls of
# other kinds.
_FEW = 4


class GraphCapturer(Protocol):
    """Captures functions one after the other, in memory of their own that they share."""

    def capture(
        self, run: Callable[[list[Any]], Sequence[Any]], arguments: list[Any]
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        """Capture a function of a list of arguments, which is emptied, without running it.

        Returns:
            What runs the CUDA graph, and the function's results: of their memory a later CUDA graph takes what is free.

        Raises:
            RuntimeError: it cannot be captured, or memory is short. Nothing is left behind.
        """

    def drawn(self) -> Any:
        """How many random numbers were drawn."""

    def draw_from(self, place: Any) -> None:
        """Have those that were drawn since then drawn again."""

    def blank(self, value: torch.Tensor) -> torch.Tensor:
        """Memory for a copy of a tensor: of the CUDA graph's own, within a function that is captured."""

    def enter(self) -> None:
        """The memory is about to be written to, and a CUDA graph run: what uses it now comes first."""

    def begin(self) -> None:
        """Functions of one step are about to be captured."""

    def end(self) -> None:
        """They are."""

    def release(self) -> None:
        """Give the memory back: nothing that was captured may run again."""


class GraphPool:
    """The memory of one model's CUDA graphs: those of one step at a time, of which one is under way at a time.

    Attributes:
        capturer: captures into it.
        placements: where blocks of CUDA graphs are steered to.
    """

    def __init__(self, capturer: GraphCapturer, gradients: Callable[[], Iterable[torch.Tensor]] = tuple) -> None:
        """Nothing is captured yet; `gradients` tells those that parameters have."""
        self.capturer, self.placements = capturer, Placements()
        self._gradients = gradients
        self._owner: weakref.ref[CudaGraphStep] | None = None
        self._turns = 0  # how often little came of what was captured, one time after the other
        self._steps = 0  # that were taken with what is captured
        self._waiting: weakref.ref[CudaGraphStep] | None = None  # which step has come last that is not captured yet
        self._waited = 0  # how often it has come, one time after the other
        self._returned: list[AliasedOutputs] = []
        self._saved: weakref.ref[torch.Tensor] | None = None
        self._pending = False

    @property
    def busy(self) -> bool:
        """Whether something saved for a backward that has not run is in it."""
        return self._saved is not None and self._saved() is not None

    def claim(self, step: CudaGraphStep, *, anew: bool = False, at_once: bool = False) -> bool:
        """Give the memory to a step whose forward is to run, while nothing is busy; whether it may be captured.

        Another step's CUDA graphs are forgotten for it, or its own where they are to be made anew. Where little came of
        the last ones a second time, a step is captured once it has come twice in a row, then four times, and so on.

        Args:
            step: whose forward is to run.
            anew: whether its own CUDA graphs do not serve any more.
            at_once: whether it is captured however often it has come: as it is it has no room.
        """
        if self._owner is not None and (anew or self._owner() is not step):
            self.release()
        if self._owner is None and self._turns:
            if self._waiting is None or self._waiting() is not step:
                self._waiting, self._waited = weakref.ref(step), 0
            self._waited += 1
            if self._waited < 2 ** (self._turns - 1) and not at_once:
                return False
        self._owner, self._waiting = weakref.ref(step), None
        return True

    def favors(self) -> None:
        """The next step to come is captured at once."""
        self._turns = 0

    def is_free_for(self, step: CudaGraphStep) -> bool:
        """Whether the step's CUDA graphs may run now: they are there, and nobody needs what they write over."""
        return not self.busy and self._owner is not None and self._owner() is step and self.copy_out()

    def copy_out(self) -> bool:
        """Have outputs copied where they are held; whether the memory may be written over."""
        self._returned = [outputs for outputs in self._returned if not outputs.copy_out(self._gradients)]
        return not self._returned

    def returns(self, outputs: AliasedOutputs) -> None:
        """Results or gradients in it are the caller's."""
        self._returned.append(outputs)

    def begin(self, saved: torch.Tensor | None) -> None:
        """The forward of a step has run; what it saved is in use as long as this tensor of it."""
        self._steps += 1
        self._pending, self._saved = True, None if saved is None else weakref.ref(saved)

    def end(self) -> None:
        """The backward of the step under way has run."""
        self._pending, self._saved = False, None

    def is_under_way(self, step: CudaGraphStep) -> bool:
        """Whether what was saved last, and not used up, is this step's."""
        return self._pending and self._owner is not None and self._owner() is step

    def release(self) -> None:
        """Forget what is captured and give its memory back, unless a backward needs it: other code is to have it."""
        self._waiting = None
        self.forget_captured()

    def forget_captured(self) -> None:
        """As `release`, for code of the step that has come: how often it has come in a row goes on being counted."""
        if self.busy or self._owner is None:
            return
        self.end()
        if not self.copy_out():
            self._returned = []  # their memory stays as long as what is held of it
        if self._steps:
            self._turns = self._turns + 1 if self._steps < _FEW else 0
        self._steps = 0
        step, self._owner = self._owner(), None
        if step is not None:
            step.forget()
        self.capturer.release()
