"""What holds of an operator whatever it is called with: torch is asked once, graphs have thousands of calls."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from memopt.torch_compat.operators import OpOverload, schema_of

# Operators whose effects are torch's own to know, and do not change; others may be registered as effectful any time.
_SETTLED = ("aten", "prims")
_OF_RANKS = ("_dtensor", "symm_mem")
_effects: dict[Any, bool] = {}


@functools.cache
def draws(target: Any) -> bool:
    """Whether it draws random numbers, by its tags."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


@functools.cache
def is_pointwise(target: Any) -> bool:
    """Whether torch calls it an operator of one element at a time."""
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


@functools.cache
def gives_views(target: Any) -> bool:
    """Whether its schema says that a result aliases an argument."""
    if not isinstance(target, OpOverload):
        return False
    return any(result.alias_info is not None for result in schema_of(target).returns)


@functools.cache
def is_collective(target: Any) -> bool:
    """Whether an operator waits for other ranks, so that all of them must run it equally often and in one order."""
    return isinstance(target, OpOverload) and ("c10d" in target.namespace or target.namespace in _OF_RANKS)


def is_impure(node: fx.Node) -> bool:
    """Whether a node's operator does more than compute a value, as torch has it, or is a collective."""
    target = node.target
    found = _effects.get(target)
    if found is None:
        found = bool(node.is_impure()) or is_collective(target)
        if isinstance(target, OpOverload) and target.namespace in _SETTLED:
            _effects[target] = found
    return found
