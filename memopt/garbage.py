"""Python's garbage collector while graphs are made: millions of objects that stay, which it would look at often."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# New objects between two looks for garbage while graphs are made: Python's own setting spends an eighth of the time on
# looking through them.
_OBJECTS = (50_000, 20, 20)


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Look for cyclic garbage less often while the block runs."""
    before = gc.get_threshold()
    if before[0]:  # else the caller wants no looking at all
        gc.set_threshold(*_OBJECTS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
