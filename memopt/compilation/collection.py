"""How the graphs of a call come: one by one, each to be planned at once, or all collected before one is planned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from memopt.program import Program


class WholeStepNeeded(Exception):
    """A graph break: the budget is shared among several graphs, so all must be seen before the first is planned."""


class Collection:
    """Whether a call's graphs are collected, may be, or were.

    Attributes:
        graphs: those that were collected so far; None while graphs are planned as they come.
        possible: whether a graph break may be answered by collecting all graphs first.
        complete: whether all graphs of the call were collected, and none but those may come.
        rehearsing: whether graphs are collected as planned, for the code that they become.
    """

    def __init__(self, *, possible: bool = False) -> None:
        """Nothing is collected yet."""
        self.graphs: list[Program] | None = None
        self.possible, self.complete, self.rehearsing = possible, False, False

    @property
    def may_begin(self) -> bool:
        """Whether all graphs may be collected before one is planned, and are not yet."""
        return self.possible and self.graphs is None

    @contextlib.contextmanager
    def collecting(self) -> Iterator[list[Program]]:
        """Within: graphs are only collected; gives the list of them."""
        collected: list[Program] = []
        self.graphs = collected
        try:
            yield collected
        finally:
            self.graphs = None

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Within: what is collected is lowered as planned, for its code."""
        self.rehearsing = True
        try:
            yield
        finally:
            self.rehearsing = False

    @contextlib.contextmanager
    def done(self) -> Iterator[None]:
        """Within: a graph break asks for no further collection; after it, it may, as another size is another step."""
        self.possible = False
        try:
            yield
        finally:
            self.possible = True

    @contextlib.contextmanager
    def all_known(self) -> Iterator[None]:
        """Within: a graph that was not collected is none of this step."""
        self.complete = True
        try:
            yield
        finally:
            self.complete = False
