"""What views and movements of a random recipe's values are drawn with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from torch import Tensor

from tests.recipe_builder import Builder


def _shape_like(b: Builder, x: Tensor) -> tuple[int, ...]:
    """Another shape of as many elements."""
    numel = x.numel()
    options = [(numel,), (-1,), tuple(x.shape), (1, numel), (numel, 1)]
    options += [(d, numel // d) for d in (2, 3, 4, 6) if numel % d == 0] if numel else []
    options += [(2, 2, numel // 4)] if numel and numel % 4 == 0 else []
    return b.choose(options)


def _slice_params(b: Builder, x: Tensor) -> tuple[Any, ...]:
    dim = b.dim(x)
    length = x.shape[dim]
    start = b.draw(st.integers(0, max(0, length - 1)))
    stop = b.draw(st.integers(start if b.chance(12) else min(length, start + 1), length))
    return dim, start, stop, b.choose([1, 1, 1, 2])


def _narrow_params(b: Builder, x: Tensor) -> tuple[Any, ...]:
    dim, start, stop, _ = _slice_params(b, x)
    return dim, start, stop - start


def _expand_params(b: Builder, x: Tensor) -> tuple[Any, ...]:
    kept = tuple(b.choose([2, 3]) if size == 1 and b.chance(2) else size for size in x.shape)
    return ((b.choose([1, 2]), *kept) if b.chance(2) else kept,)


VIEW_PARAMS: dict[str, Callable[[Builder, Tensor], tuple[Any, ...]]] = {
    "view": lambda b, x: (_shape_like(b, x),),
    "reshape": lambda b, x: (_shape_like(b, x),),
    "unsqueeze": lambda b, x: (b.draw(st.integers(0, x.dim())),),
    "slice": _slice_params,
    "narrow": _narrow_params,
    "select": lambda b, x: (b.dim(x), b.choose([0, -1])),
    "expand": _expand_params,
    "flip": lambda b, x: ((b.dim(x),),),
    "pad": lambda b, x: (b.choose([0, 1]), b.choose([0, 1, -1]), b.choose([0.0, 1.0])),
    "repeat": lambda b, x: ((2, *[1] * (x.dim() - 1)),),
    "split": lambda b, x: (b.choose([1, 2, 3]), b.dim(x)),
    "unbind": lambda b, x: (b.dim(x),),
    "chunk": lambda b, x: (2, b.dim(x)),
    "transpose": lambda b, x: (b.dim(x), b.dim(x)),
    "permute": lambda b, x: (tuple(b.draw(st.permutations(range(x.dim())))),),
    "cancelling_permutes": lambda b, x: (tuple(b.draw(st.permutations(range(x.dim())))),),
}
