"""Inference functions that are made from programs, and made anew where a weight that was folded has changed."""

from __future__ import annotations

from collections.abc import Callable

from memopt.backends.aten import Boxed, emit
from memopt.capture.watched import Rewrite, Watched
from memopt.program import Program


class WatchedProgram(Watched):
    """As `Watched`, for engines that take programs instead of graph modules."""

    def __init__(
        self,
        program: Program,
        rewrite: Rewrite,
        bind: Callable[[Program], Boxed],
    ) -> None:
        """Take the program, how to rewrite it for new weights, and how to make a function of it."""
        self._bind = bind
        super().__init__(program, rewrite, emit)

    def _compile(self, program: Program) -> Boxed:
        return self._bind(program)
