"""What holds for as long as a block runs, in its thread: a value of a context variable, or a hook that is in force."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def scoped(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Within: the variable has this value, in this thread; after it the value of before."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class Hook:
    """What is set up once in a process, and acts only within blocks.

    Elsewhere, and in other threads, all is as ever.
    """

    def __init__(self, set_up: Callable[[], None]) -> None:
        """As a decorator of what sets it up, when it is first wanted; that asks `in_force` each time it acts."""
        self._set_up: Callable[[], None] | None = set_up
        self._in_force = ContextVar(set_up.__name__, default=False)

    def within(self) -> contextlib.AbstractContextManager[None]:
        """A block in which it acts."""
        if self._set_up is not None:
            self._set_up()
            self._set_up = None  # not before: where it fails it is tried again
        return scoped(self._in_force, True)

    @property
    def in_force(self) -> bool:
        """Whether this thread is within such a block."""
        return self._in_force.get()
