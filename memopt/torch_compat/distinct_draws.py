"""Calls that draw random numbers, kept apart where torch merges equal calls of a graph into one.

Its list of such operators lacks many (`uniform`, `exponential`, `rrelu_with_noise_functional`, fused attention with
dropout among them): two calls on one value would draw once, and return the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from typing import Any

from torch._functorch import compile_utils
from torch._ops import OpOverloadPacket

_LIST = "rand_ops"


@functools.cache
def keep_draws_apart(draws: Callable[[Any], bool]) -> None:
    """Keep them apart from now on in this process; tried on torch 2.13.

    Args:
        draws: whether an overload draws random numbers.
    """
    known: Any = getattr(compile_utils, _LIST, None)
    if known is not None:
        setattr(compile_utils, _LIST, _Drawing(known, draws))


class _Drawing(Container[Any]):
    """The operators that torch lists, and those that are tagged so."""

    def __init__(self, listed: Container[Any], draws: Callable[[Any], bool]) -> None:
        self._listed, self._draws = listed, draws
        self._tagged = functools.cache(self._is_tagged)  # a graph has thousands of calls of few operators

    def __contains__(self, target: object) -> bool:
        return target in self._listed or (isinstance(target, OpOverloadPacket) and self._tagged(target))

    def _is_tagged(self, target: OpOverloadPacket[Any, Any]) -> bool:
        overloads = target.overloads()  # type: ignore[no-untyped-call]
        return any(self._draws(getattr(target, name)) for name in overloads)
