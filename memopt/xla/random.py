"""Lowerings of operators that draw random numbers: each from a key of its own, all from one key per call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from memopt.xla.table import Context, jax_dtype, lowers, wide

aten = torch.ops.aten


@lowers(aten.native_dropout.default, context=True)
def _dropout(context: Context, x: Any, p: float, train: bool | None) -> Any:
    if train is False or p == 0:
        return x, jnp.ones(x.shape, bool)
    if p == 1:
        return jnp.zeros_like(x), jnp.zeros(x.shape, bool)
    mask = jax.random.bernoulli(context.key(), 1 - p, x.shape)
    return jnp.where(mask, wide(x) * (1 / (1 - p)), 0), mask


@lowers(aten.bernoulli.default, context=True)
def _bernoulli(context: Context, p: Any, *, generator: None = None) -> Any:
    return jax.random.bernoulli(context.key(), wide(p), p.shape)


@lowers(aten.bernoulli.p, context=True)
def _bernoulli_p(context: Context, x: Any, p: float = 0.5, *, generator: None = None) -> Any:
    return jax.random.bernoulli(context.key(), p, x.shape)


def _uniform(context: Context, shape: Any, low: float = 0.0, high: float = 1.0) -> Any:
    compute = jnp.promote_types(jax_dtype(context.value().dtype), jnp.float32)
    return jax.random.uniform(context.key(), tuple(shape), compute, low, high)


def _normal(context: Context, shape: Any) -> Any:
    compute = jnp.promote_types(jax_dtype(context.value().dtype), jnp.float32)
    return jax.random.normal(context.key(), tuple(shape), compute)


@lowers(aten.rand.default, context=True)
def _rand(context: Context, shape: Sequence[Any], **layout: Any) -> Any:
    return _uniform(context, shape)


@lowers(aten.rand_like.default, context=True)
def _rand_like(context: Context, x: Any, **layout: Any) -> Any:
    return _uniform(context, x.shape)


@lowers(aten.uniform.default, context=True)
def _uniform_of(context: Context, x: Any, low: float = 0.0, high: float = 1.0, *, generator: None = None) -> Any:
    return _uniform(context, x.shape, low, high)


@lowers(aten.randn.default, context=True)
def _randn(context: Context, shape: Sequence[Any], **layout: Any) -> Any:
    return _normal(context, shape)


@lowers(aten.randn_like.default, context=True)
def _randn_like(context: Context, x: Any, **layout: Any) -> Any:
    return _normal(context, x.shape)


@lowers(aten.normal_functional.default, context=True)
def _normal_of(context: Context, x: Any, mean: float = 0.0, std: float = 1.0, *, generator: None = None) -> Any:
    return _normal(context, x.shape) * std + mean


@lowers(aten.randint.default, context=True)
def _randint(context: Context, high: int, shape: Sequence[Any], **layout: Any) -> Any:
    return jax.random.randint(context.key(), tuple(shape), 0, high, jax_dtype(context.value().dtype))


@lowers(aten.randint.low, context=True)
def _randint_low(context: Context, low: int, high: int, shape: Sequence[Any], **layout: Any) -> Any:
    return jax.random.randint(context.key(), tuple(shape), low, high, jax_dtype(context.value().dtype))


@lowers(aten.randperm.default, context=True)
def _randperm(context: Context, count: int, **layout: Any) -> Any:
    return jax.random.permutation(context.key(), count)
