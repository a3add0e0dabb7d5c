"""What a compiled forward returns to autograd: tensors that may be written to, and whose writes autograd notices.

1. A result that is a view within AOTAutograd's function could never be written to: autograd would have to go through
   the function for that. Views that the model returns are made outside of the function, of results that need be none.
2. Autograd notices a write to what is saved for backward by a count of writes. Code of Inductor's returns views that
   have a count of their own, and so does `_unsafe_view`, by which AOTAutograd itself hides views from autograd.

3. It notices those to what no gradient that is asked for needs as well: eager's graph has a node of each operation. So
   some of what is saved may be given with a count that nobody else has, and who asked for that looks at it himself.

`detach` makes what is no view and shares the count. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext

_Run = Callable[[list[Any]], Sequence[Any]]


class _InPart(threading.local):
    values: list[tuple[int, torch.Tensor]] | None = None


_in_part = _InPart()


class saved_in_part:
    """Within, compiled forwards give what they save in part: its place in their results, and it without gradients.

    Entered once, around each call of a graph.
    """

    __slots__ = ("_before", "_found")

    def __init__(self, wanted: bool = True) -> None:
        """Wanted or not: within another one that wants it, what is not wanted is not given to that."""
        self._found: list[tuple[int, torch.Tensor]] | None = [] if wanted else None
        self._before: list[tuple[int, torch.Tensor]] | None = None

    def __enter__(self) -> list[tuple[int, torch.Tensor]]:
        self._before, _in_part.values = _in_part.values, self._found
        return [] if self._found is None else self._found

    def __exit__(self, *_: object) -> None:
        _in_part.values = self._before


def writable(run: _Run, in_part: Callable[[], Sequence[int]] = tuple) -> _Run:
    """A compiled forward, whose results are views of nothing to autograd; those of one memory share a count of writes.

    Which these are is seen when it is called first. What shows an argument stays the view that it is.

    Args:
        run: empties its list of arguments and returns the caller's results, and what it saves behind them.
        in_part: places of what it saves in part, where the caller can write to it; asked for when it is called.
    """
    _hide_no_views()
    places: list[tuple[int, int]] | None = None
    reached: set[int] = set()

    @functools.wraps(run)
    def returned(args: list[Any]) -> Sequence[Any]:
        nonlocal places, reached
        given = {_memory(value) for value in args} if places is None else set()
        results = list(run(args))
        if places is None:
            places, reached = _places(results, given), _reached(results, given)
        for place, first in places:
            value, base = results[place], results[first]
            if place == first:
                results[place] = value.detach()
            elif value is not base and _memory(value) == _memory(base):  # a CUDA graph has results in other memory
                results[place] = _shown_by(base, value).detach()
        if _in_part.values is not None:
            for place in in_part():
                if place in reached:
                    _in_part.values.append((place, results[place].detach()))  # autograd's node may keep it
                    results[place] = results[place].data
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


def _shown_by(base: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A view of `base` that shows what `value` does of their memory: numbers of another type, conjugates, negatives."""
    base = base.conj() if base.is_conj() else base
    base = base._neg_view() if base.is_neg() else base
    if base.dtype != value.dtype:
        largest = max(base.element_size(), value.element_size())
        elements = base.untyped_storage().nbytes() // largest * largest // base.element_size()
        base = torch.as_strided(base, (elements,), (1,), 0).view(value.dtype)
    shown = torch.as_strided(base, value.size(), value.stride(), value.storage_offset())
    shown = shown.conj() if value.is_conj() else shown
    return shown._neg_view() if value.is_neg() else shown


def _reached(results: Sequence[Any], given: set[int | None]) -> set[int]:
    """Places of the results that show memory which an argument or another result shows."""
    memories = [_memory(value) for value in results]
    return {
        place
        for place, memory in enumerate(memories)
        if memory is not None and (memory in given or memories.count(memory) > 1)
    }


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
