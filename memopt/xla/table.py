"""The table of lowerings: which function computes an ATen operator in JAX, and what such a function may ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx

_DTYPES = {
    torch.bool: jnp.bool_,
    torch.uint8: jnp.uint8,
    torch.int8: jnp.int8,
    torch.int16: jnp.int16,
    torch.int32: jnp.int32,
    torch.int64: jnp.int64,
    torch.float16: jnp.float16,
    torch.bfloat16: jnp.bfloat16,
    torch.float32: jnp.float32,
    torch.float64: jnp.float64,
    torch.complex64: jnp.complex64,
    torch.complex128: jnp.complex128,
}
HALVES = (jnp.float16, jnp.bfloat16)


class LowerError(RuntimeError):
    """A graph has no form under XLA; one line names the operator and its source line."""


@dataclasses.dataclass
class Context:
    """What a lowering may ask for beside its operands.

    Attributes:
        node: the node that is lowered.
        platform: "cpu" or "cuda" where the function will run on one only; None where it must run on both.
        key: draws a fresh random key, a different one for each node of the graph.
        parts: how many parts of the batch a convolution is run in, one after another, at most: XLA's kernels on the CPU
            copy what they read and write into another layout, and hold one part of it at a time.
    """

    node: fx.Node
    platform: str | None
    key: Callable[[], jax.Array]
    parts: int = 1

    def value(self, index: int | None = None) -> torch.Tensor:
        """The fake tensor of the node's result, or of one of its results."""
        found = self.node.meta["val"]
        return found if index is None else found[index]  # type: ignore[no-any-return]

    def argument(self, index: int) -> torch.Tensor:
        """The fake tensor of a positional operand."""
        operand: Any = self.node.args[index]
        return operand.meta["val"]  # type: ignore[no-any-return]


Lowering = Callable[..., Any]
LOWERINGS: dict[Any, Lowering] = {}
WITH_CONTEXT: set[Any] = set()


def lowers(*operators: Any, context: bool = False) -> Callable[[Lowering], Lowering]:
    """Enter a function for these overloads. With `context` its first argument is a `Context`."""

    def enter(function: Lowering) -> Lowering:
        for operator in operators:
            LOWERINGS[operator] = function
            if context:
                WITH_CONTEXT.add(operator)
        return function

    return enter


def jax_dtype(dtype: torch.dtype) -> Any:
    """JAX's dtype of a torch dtype. Raises LowerError for one that XLA programs here cannot hold."""
    if dtype not in _DTYPES:
        raise LowerError(f"dtype {str(dtype).removeprefix('torch.')} has no form under XLA")
    return jnp.dtype(_DTYPES[dtype])


def wide(value: Any) -> Any:
    """The value in float32 where it is of a half type: PyTorch's kernels compute these in float32 and round once."""
    if isinstance(value, jax.Array) and value.dtype in HALVES:
        return value.astype(jnp.float32)
    return value


def random_key(data: jax.Array) -> jax.Array:
    """A key from two words, uint32[2], for XLA's own generator: compiled at once, where others unroll their rounds."""
    return jax.random.wrap_key_data(jnp.concatenate([data, data ^ jnp.uint32(0x9E3779B9)]), impl="rbg")
