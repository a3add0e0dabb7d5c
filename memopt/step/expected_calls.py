"""Calls of a first step, that are planned together as an earlier run of the same script has met them."""

from __future__ import annotations

import copy

from memopt.budget import Budget
from memopt.step.earlier_calls import KnownCalls
from memopt.step.reference import Reference


class ExpectedCalls:
    """What is expected of a step by an earlier run, and what to go back to where fewer calls are made."""

    def __init__(self) -> None:
        """Nothing is expected yet."""
        self._before: tuple[int, Reference] | None = None  # bytes beside one call, and what a fraction was of

    def __bool__(self) -> bool:
        """Whether calls are planned together only as an earlier run had them."""
        return self._before is not None

    def of_script(self, model: str, budget: Budget | None, graph: str) -> tuple[int, int]:
        """Calls of a step, and bytes of their arguments, as an earlier run has met them: 1 if none did, or once asked.

        Args:
            model: its class's name.
            budget: of the step.
            graph: fingerprint of the first graph of a call.
        """
        return (1, 0) if self or budget is None else KnownCalls().get(model, budget.text, graph)

    def begin(self, beside: int, reference: Reference) -> None:
        """They are planned together from now on, with so many bytes of arguments beside those of one call."""
        self._before = beside, copy.copy(reference)

    def take_back(self, reference: Reference) -> int:
        """A fraction is of what it was before, calls are planned alone; the bytes that were counted beside one."""
        assert self._before is not None
        beside, before = self._before
        reference.return_to(before)
        return beside

    def were_fewer(self, model: str, budget: Budget, graph: str, made: int) -> None:
        """A step has made fewer calls: what later runs are to expect; arguments as of `of_script`."""
        KnownCalls().put(model, budget.text, graph, made, 0)
