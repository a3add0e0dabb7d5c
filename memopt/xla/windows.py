"""What lowerings of convolutions and pooling share: a number for each axis, and a batch that is run in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from memopt.xla.table import Context


def many(value: Sequence[int], count: int) -> tuple[int, ...]:
    """One number for each of `count` axes, of a list that holds one for all or one for each."""
    return tuple(value) * count if len(value) == 1 else tuple(value)


def parts_of(x: Any, most: int) -> int:
    """How many equal parts of two images or more a batch is run in, `most` at most."""
    return max(n for n in range(1, max(1, min(most, x.shape[0] // 2)) + 1) if x.shape[0] % n == 0)


def cut(x: Any, parts: int) -> Any:
    """The batch as so many equal parts, along a new first axis."""
    return jnp.reshape(x, (parts, x.shape[0] // parts, *x.shape[1:]))


def joined(x: Any) -> Any:
    """The batch of which these are the parts."""
    return jnp.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))


def in_parts(context: Context, function: Any, *given: Any) -> Any:
    """The function of arrays whose first axis is the batch: of all at once, or of one part after another."""
    parts = 1 if context.parts == 1 else parts_of(given[0], context.parts)
    if parts == 1:
        return function(*given)
    found = jax.lax.map(lambda part: function(*part), tuple(cut(x, parts) for x in given))
    return jax.tree.map(joined, found)
