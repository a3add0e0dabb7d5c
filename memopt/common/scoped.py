"""A context variable that has a value for as long as a block runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
