"""Python's garbage collector while graphs are made and tried: millions of objects that stay, which it would look at."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Iterator

import torch

# New objects between two looks for garbage while graphs are made, and such looks between those at older objects: what
# outlives one look mostly stays. Python's own setting spends an eighth of the time on looking through it.
_OBJECTS = (100_000, 200, 50)


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
def not_collecting() -> Iterator[None]:
    """Look for no cyclic garbage while the block runs: nothing dies in it but what it lets go of itself."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# So many objects no collection looks at from the beginning: Python 3.12 has some hundred, callers have what they froze.
_PYTHONS_OWN = 1000

_once = False  # whether what was looked at once is left aside
_aside: list[weakref.ref[torch.Tensor]] = []  # the tensors of that: Python lists no objects that are left aside


def _frozen_by_the_caller() -> bool:
    """Counts what is frozen object by object: some milliseconds for each million."""
    return gc.get_freeze_count() >= _PYTHONS_OWN


@contextlib.contextmanager
def looking_once() -> Iterator[None]:
    """While the block runs, `collect` looks at no object twice: what was there at one call is left aside by the next.

    So garbage is found that tries leave behind, in the time that those take and not in that of all that was traced.
    """
    global _once
    # What the caller has frozen stays so, and what is left aside could not be told from it.
    before, _once = _once, _once or not _frozen_by_the_caller()
    try:
        yield
    finally:
        if _once and not before:
            _unfreeze()
        _once = before


def collect() -> None:
    """Let go of cyclic garbage, of device memory that it holds above all."""
    gc.collect()
    if _once:
        _aside[:] = [each for each in _aside if each() is not None]
        _aside.extend(map(weakref.ref, _listed()))
        gc.freeze()


def collect_all() -> None:
    """Let go of cyclic garbage that was still in use when `collect` looked at it, too: where memory is missed."""
    if _once:
        _unfreeze()
    collect()


def collect_early() -> None:
    """Look for garbage now, while there is time, where `collect` will have to look at less for it."""
    if _once:
        collect()


def python_tensors() -> list[torch.Tensor]:
    """The tensors that are Python's objects, but those that the user told the collector of garbage to leave aside."""
    return [*(tensor for each in _aside if (tensor := each()) is not None), *_listed()]


def _unfreeze() -> None:
    _aside.clear()
    gc.unfreeze()


def _listed() -> list[torch.Tensor]:
    objects, kinds = gc.get_objects(), _Tensors()
    # A million objects is usual: they are told apart without a line of Python for each.
    return list(itertools.compress(objects, map(kinds.__getitem__, map(type, objects))))


class _Tensors(dict[type, bool]):
    """Whether objects of a class are tensors."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = found = issubclass(kind, torch.Tensor)
        return found
