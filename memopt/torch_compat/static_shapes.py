"""Which sizes Dynamo traces as symbols: none, as plans are made for the bytes of every tensor, or those that vary."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch._dynamo.variables import builder
from torch.fx.experimental.symbolic_shapes import DimDynamic

from memopt.common.scoped import scoped


@dataclasses.dataclass(frozen=True)
class Varying:
    """Sizes that are symbols.

    Attributes:
        dims: their dimensions, by `id` of the tensor.
        alike: whether sizes that are equal now are one symbol.
        largest: of each size that varies, by what it is now, the largest that it was in any call.
    """

    dims: Mapping[int, tuple[int, ...]]
    alike: bool = True
    largest: Mapping[int, int] = dataclasses.field(default_factory=dict)


_ALL = Varying({})
_varying: contextvars.ContextVar[Varying | None] = contextvars.ContextVar("varying", default=None)


def static_shapes() -> contextlib.AbstractContextManager[None]:
    """Within: a plain tensor is traced at its own shape, also one that `mark_dynamic` or `mark_unbacked` names.

    Elsewhere marks are as ever. Tensor subclasses, nested ones say, have the symbols that they need. Tried on 2.13.
    """
    return varying_shapes(_ALL)


def varying_shapes(varying: Varying) -> contextlib.AbstractContextManager[None]:
    """As `static_shapes`, but for the sizes that vary: they are symbols, and may be found to be of one size only."""
    _install()
    return scoped(_varying, varying)


def largest_seen(size: int) -> int:
    """The largest that a size which varies was in any call, by what it is in the one that is captured."""
    varying = _varying.get()
    return size if varying is None else max(size, varying.largest.get(size, size))


def marked_sizes(tensor: torch.Tensor) -> frozenset[int]:
    """The dimensions that the user has marked: `mark_dynamic`, `maybe_mark_dynamic`. Tried on 2.13."""
    names = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices")
    return frozenset(dim for name in names for dim in getattr(tensor, name, ()))


@functools.cache
def _install() -> None:
    """Ask before Dynamo decides upon the sizes of a tensor, once in a process."""
    room: Any = builder
    decide = getattr(room, "_automatic_dynamic", None)
    if decide is None:
        return

    def decided(e: Any, tx: Any, source: Any, static_shapes: bool, *args: Any, **kwargs: Any) -> Any:
        varying = _varying.get()
        fixed = varying is not None and type(e) in (torch.Tensor, torch.nn.Parameter)
        found = decide(e, tx, source, static_shapes or fixed, *args, **kwargs)
        dims = varying.dims.get(id(e), ()) if varying is not None and fixed else ()
        if dims:
            symbol = DimDynamic.DUCK if varying is not None and varying.alike else DimDynamic.DYNAMIC
            sizes = [symbol if dim in dims else size for dim, size in enumerate(found.dynamic_sizes)]
            found = dataclasses.replace(found, dynamic_sizes=sizes)
        return found

    room._automatic_dynamic = decided
