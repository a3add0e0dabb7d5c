"""Python's frames in one piece of memory, while graphs are made.

CPython from 3.11 on keeps frames in pieces of 16 KiB. It asks the system for one where a call does not fit into the
last, and gives it back when that call returns: a function that is called again and again where a piece happens to end
takes some microseconds more for each call, which made the passes of a joint graph take four times as long. A piece is
as large as its first frame needs, so a frame that claims much room has what is called below it lie beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Words that a frame claims. A piece has a power of two of bytes, of which the frame takes no more than it uses: this is
# 2 MiB and a little, so that about as much is left for others. It is mapped, and not in memory before it is used.
_WORDS = 2**18


def in_one_piece(function: Callable[P, T]) -> Callable[P, T]:
    """The function, called such that the frames of all that it calls lie in one piece."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_WORDS)
    return functools.wraps(function)(call)
