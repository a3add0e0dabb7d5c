"""Functions that take their arguments as one list, which they empty: AOTAutograd then keeps no argument alive."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def boxed(function: T) -> T:
    """The same function or class, marked so for AOTAutograd; tried on torch 2.11 and 2.13."""
    marked: Any = function
    marked._boxed_call = True
    return function
