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


@contextlib.contextmanager
def collecting_new_only() -> Iterator[None]:
    """Collect garbage once, and within the block among what is made there alone, which takes milliseconds.

    What was there before is looked at again after the outermost block.
    """
    if gc.get_freeze_count():  # by an outer block, or by the caller, who may not want it looked at ever
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
