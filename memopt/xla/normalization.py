"""Lowerings of normalizations and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from memopt.xla.table import Context, lowers, wide

aten = torch.ops.aten


def _channels(x: Any, values: Any) -> Any:
    return jnp.reshape(wide(values), (1, -1) + (1,) * (x.ndim - 2))


def _moments(x: Any, axes: Any, keepdims: bool = False) -> tuple[Any, Any]:
    mean = jnp.mean(x, axes, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), axes, keepdims=keepdims)
    return (mean if keepdims else jnp.squeeze(mean, axes)), variance


def _scaled(x: Any, mean: Any, rstd: Any, weight: Any, bias: Any) -> Any:
    scale = rstd if weight is None else rstd * wide(weight)
    result = (wide(x) - _channels(x, mean)) * _channels(x, scale)
    return result if bias is None else result + _channels(x, bias)


@lowers(aten._native_batch_norm_legit_no_training.default, context=True)
def _batch_norm_eval(
    context: Context, x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> Any:
    rstd = jax.lax.rsqrt(wide(var) + eps)
    result = _scaled(x, mean, rstd, weight, bias)
    if context.value(1).numel() == 0:  # where PyTorch saves no statistics: on the CPU
        return result, jnp.zeros((0,), jnp.float32), jnp.zeros((0,), jnp.float32)
    return result, mean, rstd


@lowers(aten._native_batch_norm_legit.no_stats)
def _batch_norm_batch(x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    mean, variance = _moments(wide(x), (0, *range(2, x.ndim)))
    rstd = jax.lax.rsqrt(variance + eps)
    return _scaled(x, mean, rstd, weight, bias), mean, rstd


@lowers(aten._native_batch_norm_legit_functional.default, context=True)
def _batch_norm(
    context: Context, x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool,
    momentum: float, eps: float,
) -> Any:  # fmt: skip
    if not training:
        evaluated = _batch_norm_eval(context, x, weight, bias, running_mean, running_var, momentum, eps)
        return (*evaluated, running_mean, running_var)
    mean, variance = _moments(wide(x), (0, *range(2, x.ndim)))
    rstd = jax.lax.rsqrt(variance + eps)
    count = x.size // x.shape[1]
    unbiased = variance * (count / max(1, count - 1))
    new_mean = wide(running_mean) * (1 - momentum) + mean * momentum
    new_var = wide(running_var) * (1 - momentum) + unbiased * momentum
    return _scaled(x, mean, rstd, weight, bias), mean, rstd, new_mean, new_var


@lowers(aten.native_batch_norm_backward.default)
def _batch_norm_backward(
    gradient: Any, x: Any, weight: Any, running_mean: Any, running_var: Any, saved_mean: Any, saved_rstd: Any,
    train: bool, eps: float, mask: Sequence[bool],
) -> Any:  # fmt: skip
    axes = (0, *range(2, x.ndim))
    if train:
        mean, rstd = wide(saved_mean), wide(saved_rstd)
    else:
        mean, rstd = wide(running_mean), jax.lax.rsqrt(wide(running_var) + eps)
    gradient, count = wide(gradient), x.size // x.shape[1]
    centred = wide(x) - _channels(x, mean)
    total, dot = jnp.sum(gradient, axes), jnp.sum(gradient * centred, axes)
    scale = rstd if weight is None else rstd * wide(weight)
    dx = gradient
    if train:
        dx = gradient - _channels(x, total / count) - centred * _channels(x, dot * rstd * rstd / count)
    return dx * _channels(x, scale) if mask[0] else None, dot * rstd if mask[1] else None, total if mask[2] else None


@lowers(aten.native_layer_norm.default)
def _layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    values = wide(x)
    mean, variance = _moments(values, tuple(range(x.ndim - len(shape), x.ndim)), True)
    rstd = jax.lax.rsqrt(variance + eps)
    result = (values - mean) * rstd
    result = result if weight is None else result * wide(weight)
    return (result if bias is None else result + wide(bias)), mean, rstd


@lowers(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    gradient: Any, x: Any, shape: Sequence[int], mean: Any, rstd: Any, weight: Any, bias: Any, mask: Sequence[bool]
) -> Any:
    inner, outer = tuple(range(x.ndim - len(shape), x.ndim)), tuple(range(x.ndim - len(shape)))
    gradient = wide(gradient)
    normal = (wide(x) - wide(mean)) * wide(rstd)
    scaled = gradient if weight is None else gradient * wide(weight)
    dx = None
    if mask[0]:
        average, dot = jnp.mean(scaled, inner, keepdims=True), jnp.mean(scaled * normal, inner, keepdims=True)
        dx = (scaled - average - normal * dot) * wide(rstd)
    dw = jnp.sum(gradient * normal, outer) if mask[1] and weight is not None else None
    return dx, dw, jnp.sum(gradient, outer) if mask[2] and bias is not None else None


@lowers(aten.native_group_norm.default)
def _group_norm(x: Any, weight: Any, bias: Any, n: Any, c: int, hw: Any, groups: int, eps: float) -> Any:
    values = jnp.reshape(wide(x), (x.shape[0], groups, -1))
    mean, variance = _moments(values, 2, True)
    rstd = jax.lax.rsqrt(variance + eps)
    result = jnp.reshape((values - mean) * rstd, x.shape)
    result = result if weight is None else result * _channels(x, weight)
    return (result if bias is None else result + _channels(x, bias)), mean[..., 0], rstd[..., 0]
