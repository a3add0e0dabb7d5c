"""What a compiled forward returns to autograd: tensors that may be written to, and whose writes autograd notices.

1. A result that is a view within AOTAutograd's function could never be written to: autograd would have to go through
   the function for that. Views that the model returns are made outside of the function, of results that need be none.
2. Autograd notices a write to what is saved for backward by a count of writes. Code of Inductor's returns views that
   have a count of their own, and so does `_unsafe_view`, by which AOTAutograd itself hides views from autograd.

`detach` makes what is no view and shares the count. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext

_Run = Callable[[list[Any]], Sequence[Any]]


def writable(run: _Run) -> _Run:
    """A compiled forward, whose results are views of nothing to autograd; those of one memory share a count of writes.

    Which these are is seen when it is called first. What shows an argument stays the view that it is.

    Args:
        run: empties its list of arguments and returns the caller's results, and what it saves behind them.
    """
    _hide_no_views()
    places: list[tuple[int, int]] | None = None

    @functools.wraps(run)
    def returned(args: list[Any]) -> Sequence[Any]:
        nonlocal places
        given = {_memory(value) for value in args} if places is None else set()
        results = list(run(args))
        if places is None:
            places = _places(results, given)
        for place, first in places:
            value, base = results[place], results[first]
            if place == first:
                results[place] = value.detach()
            elif value is not base and _memory(value) == _memory(base):  # a recording has results in other memory
                shape, strides = value.size(), value.stride()
                results[place] = torch.as_strided(base, shape, strides, value.storage_offset()).detach()
        return results

    returned._boxed_call = True  # type: ignore[attr-defined]
    return returned


def _places(results: Sequence[Any], given: set[int | None]) -> list[tuple[int, int]]:
    """Which results are made anew, each with the first one in the same memory, which may be itself."""
    firsts: dict[int, int] = {}
    found = []
    for place, value in enumerate(results):
        memory = _memory(value)
        if memory is None or memory in given:
            continue
        first = firsts.setdefault(memory, place)
        if first != place or value._is_view():
            found.append((place, first))
    return found


def _memory(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def _hide_no_views() -> None:
    """Have AOTAutograd return to autograd what the forward that it lowers now returns."""
    context = TracingContext.try_get()
    hidden = None if context is None else getattr(context.fw_metadata, "unsafe_view_out_indices", None)
    if hidden is not None:
        hidden.clear()
