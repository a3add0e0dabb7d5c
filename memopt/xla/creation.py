"""Lowerings of operators that make tensors of nothing but numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy
import torch

from memopt.xla.table import Context, jax_dtype, lowers

aten = torch.ops.aten


@lowers(aten.arange.default, aten.arange.start, aten.arange.start_step, context=True)
def _arange(context: Context, *bounds: Any, **layout: Any) -> Any:
    start, end, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    dtype = jax_dtype(context.value().dtype)
    if not isinstance(end, (int, float)):
        return jnp.arange(start, end, step, dtype=dtype)
    count = max(0, math.ceil((end - start) / step))
    if isinstance(start, int) and isinstance(step, int):
        return (start + jnp.arange(count) * step).astype(dtype)
    return jnp.asarray(start + numpy.arange(count) * step, dtype)


@lowers(torch.ops.prims.iota.default, context=True)
def _iota(context: Context, length: Any, *, start: int, step: int, **layout: Any) -> Any:
    return (start + jnp.arange(length) * step).astype(jax_dtype(context.value().dtype))


@lowers(aten.full.default, context=True)
def _full(context: Context, shape: Sequence[Any], value: Any, **layout: Any) -> Any:
    return jnp.full(tuple(shape), value, jax_dtype(context.value().dtype))


@lowers(aten.zeros.default, aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default,
        context=True)  # fmt: skip
def _zeros(context: Context, shape: Sequence[Any], *ignored: Any, **layout: Any) -> Any:
    return jnp.zeros(tuple(shape), jax_dtype(context.value().dtype))


@lowers(aten.ones.default, context=True)
def _ones(context: Context, shape: Sequence[Any], **layout: Any) -> Any:
    return jnp.ones(tuple(shape), jax_dtype(context.value().dtype))


@lowers(aten.scalar_tensor.default, context=True)
def _scalar_tensor(context: Context, value: Any, **layout: Any) -> Any:
    return jnp.asarray(value, jax_dtype(context.value().dtype))


@lowers(aten.full_like.default, context=True)
def _full_like(context: Context, x: Any, value: Any, **layout: Any) -> Any:
    return jnp.full(x.shape, value, jax_dtype(context.value().dtype))


@lowers(aten.zeros_like.default, aten.empty_like.default, context=True)
def _zeros_like(context: Context, x: Any, **layout: Any) -> Any:
    return jnp.zeros(x.shape, jax_dtype(context.value().dtype))


@lowers(aten.ones_like.default, context=True)
def _ones_like(context: Context, x: Any, **layout: Any) -> Any:
    return jnp.ones(x.shape, jax_dtype(context.value().dtype))


@lowers(aten.new_zeros.default, aten.new_empty.default, aten.new_empty_strided.default, context=True)
def _new_zeros(context: Context, x: Any, shape: Sequence[Any], *ignored: Any, **layout: Any) -> Any:
    return jnp.zeros(tuple(shape), jax_dtype(context.value().dtype))


@lowers(aten.new_ones.default, context=True)
def _new_ones(context: Context, x: Any, shape: Sequence[Any], **layout: Any) -> Any:
    return jnp.ones(tuple(shape), jax_dtype(context.value().dtype))


@lowers(aten.new_full.default, context=True)
def _new_full(context: Context, x: Any, shape: Sequence[Any], value: Any, **layout: Any) -> Any:
    return jnp.full(tuple(shape), value, jax_dtype(context.value().dtype))
