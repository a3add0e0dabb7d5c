"""The search for one step's plan, kept between two attempts to plan it."""

from __future__ import annotations

from collections.abc import Callable

from memopt.common.phases import phase
from memopt.pass_manager import Pass
from memopt.step.search import StepSearch


class KeptSearch:
    """The search that was made last, as long as the step that it is of is planned anew."""

    def __init__(self) -> None:
        """There is none yet."""
        self._key: tuple[str, ...] = ()
        self._search: StepSearch | None = None

    def of(self, key: tuple[str, ...], make: Callable[[], StepSearch]) -> StepSearch:
        """The search of this key; made, and kept in place of another one, if that is another key's."""
        if self._search is None or self._key != key:
            self._key, self._search = key, make()
        return self._search

    def forget(self) -> None:
        """Let go of it, and of the graphs that it holds."""
        self._search = None

    def lowerings(self, limit: int | None) -> list[tuple[Pass, ...]]:
        """As `StepSearch.lowerings`; none without a search."""
        if self._search is None:
            return []
        with phase("rewriting"):
            return self._search.lowerings(limit)

    def all_lowering(self) -> tuple[Pass, ...]:
        """As `StepSearch.all_lowering`; none without a search."""
        return () if self._search is None else self._search.all_lowering()
