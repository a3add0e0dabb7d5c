"""Calls that draw random numbers, kept apart where torch merges equal calls of a graph into one.

Its list of such operators lacks many (`uniform`, `exponential`, `rrelu_with_noise_functional`, fused attention with
dropout among them): two calls on one value would draw once, and return the same.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import Any

import torch
from torch._functorch import compile_utils
from torch._ops import OpOverloadPacket

_LIST = "rand_ops"


@functools.cache
def keep_draws_apart() -> None:
    """Keep them apart from now on in this process; tried on torch 2.13."""
    known: Any = getattr(compile_utils, _LIST, None)
    if known is not None:
        setattr(compile_utils, _LIST, _Drawing(known))


class _Drawing(Container[Any]):
    """The operators that torch lists, and those that are tagged so."""

    def __init__(self, listed: Container[Any]) -> None:
        self._listed = listed

    def __contains__(self, target: object) -> bool:
        return target in self._listed or _draws(target)


@functools.cache
def _draws(target: object) -> bool:
    if not isinstance(target, OpOverloadPacket):
        return False
    overloads = (getattr(target, name) for name in target.overloads())  # type: ignore[no-untyped-call]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
