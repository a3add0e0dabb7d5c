"""Lowerings of pooling and its gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy
import torch

from memopt.xla.table import Context, lowers, wide
from memopt.xla.windows import in_parts, many

aten = torch.ops.aten
_GATHERED = 64  # elements of a window


def _pads(x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Padding per spatial axis, so that windows give `sizes` results (ceil mode takes more at the end)."""
    spans = zip(x.shape[2:], kernel, stride, padding, dilation, sizes, strict=True)
    return [(p, max(0, (n - 1) * s + d * (k - 1) + 1 - size - p)) for size, k, s, p, d, n in spans]


def _window(kernel: Any, stride: Any, padding: Any, dilation: Any, x: Any) -> tuple[Any, ...]:
    count = x.ndim - 2
    kernel = many(kernel, count)
    return kernel, many(stride, count) if stride else kernel, many(padding, count), many(dilation, count)


@lowers(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default, context=True)
def _max_pool(
    context: Context, x: Any, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,),
    ceil_mode: bool = False,
) -> Any:  # fmt: skip
    spatial = 3 if context.node.target is aten.max_pool3d_with_indices.default else 2
    single = x.ndim == spatial + 1
    values = x[None] if single else x
    sizes = context.value(0).shape[-spatial:]
    kernel, stride, padding, dilation = _window(kernel, stride, padding, dilation, values)
    window = (1, 1, *kernel), (1, 1, *stride)
    border = [(0, 0), (0, 0), *_pads(values, kernel, stride, padding, dilation, sizes)]
    least = -jnp.inf if jnp.issubdtype(values.dtype, jnp.floating) else jnp.iinfo(values.dtype).min
    initial, spread = jnp.asarray(least, values.dtype), (1, 1, *dilation)
    if not any(user.args[1] == 1 for user in context.node.users):  # nothing reads where the largest were
        highest = jax.lax.reduce_window(values, initial, jax.lax.max, *window, border, window_dilation=spread)
        return (highest[0] if single else highest), None

    def larger(a: Any, b: Any) -> Any:
        (value_a, place_a), (value_b, place_b) = a, b
        first = (value_a > value_b) | jnp.isnan(value_a) | ((value_a == value_b) & (place_a < place_b))
        return jnp.where(first, value_a, value_b), jnp.where(first, place_a, place_b)

    def pool(values: Any) -> Any:
        place = 1
        places: Any = 0
        for axis in range(values.ndim - 1, 1, -1):
            shape = [1] * values.ndim
            shape[axis] = values.shape[axis]
            places = places + jnp.arange(values.shape[axis], dtype=jnp.int32).reshape(shape) * place
            place *= values.shape[axis]
        places = jnp.broadcast_to(places, values.shape)
        none = jnp.asarray(jnp.iinfo(jnp.int32).max, jnp.int32)
        return jax.lax.reduce_window((values, places), (initial, none), larger, *window, border, window_dilation=spread)

    found, where = in_parts(context, pool, values)
    return (found[0], where[0]) if single else (found, where)


@lowers(aten.max_pool2d_with_indices_backward.default, context=True)
def _max_pool_backward(
    context: Context, gradient: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool,
    places: Any,
) -> Any:  # fmt: skip
    size = x.shape[-2] * x.shape[-1]
    kernel, stride, padding, dilation = (
        many(given, 2) for given in (kernel, stride if stride else kernel, padding, dilation)
    )

    def gathered(gradient: Any, places: Any) -> Any:
        total: Any = 0
        for offsets in itertools.product(*(range(size) for size in kernel)):
            place: Any = 0
            border = [(0, 0, 0)] * (gradient.ndim - 2)
            for axis, (offset, s, p, d) in enumerate(zip(offsets, stride, padding, dilation, strict=True), -2):
                count, low = gradient.shape[axis], offset * d - p
                shape = [1, 1]
                shape[axis] = count
                place = place * x.shape[axis] + (jnp.arange(count, dtype=places.dtype) * s + low).reshape(shape)
                border.append((low, x.shape[axis] - low - (count - 1) * s - 1, s - 1))
            part = jnp.where(places == place, wide(gradient), 0)
            total = total + jax.lax.pad(part, jnp.zeros((), part.dtype), border)
        return total.astype(gradient.dtype)

    def scattered(gradient: Any, places: Any) -> Any:
        flat = jnp.reshape(wide(gradient), (-1, gradient.shape[-2] * gradient.shape[-1]))
        row = jnp.arange(flat.shape[0])[:, None]
        added = jnp.zeros((flat.shape[0], size), flat.dtype).at[row, jnp.reshape(places, flat.shape)].add(flat)
        return jnp.reshape(added, (*gradient.shape[:-2], *x.shape[-2:])).astype(gradient.dtype)

    # On a GPU each element looks at the windows that it lies in: nothing is added by several threads at once.
    back = gathered if context.platform == "cuda" and math.prod(kernel) <= _GATHERED else scattered
    return back(gradient, places) if x.ndim == 3 else in_parts(context, back, gradient, places)


def _average(
    x: Any, kernel: Any, stride: Any, padding: Any, sizes: Any, count_include_pad: bool, divisor: int | None
) -> Any:
    pads = _pads(x, kernel, stride, padding, (1,) * len(kernel), sizes)
    window, steps = (1, 1, *kernel), (1, 1, *stride)

    def total(values: Any, border: Any) -> Any:
        return jax.lax.reduce_window(
            values, numpy.zeros((), values.dtype), jax.lax.add, window, steps, [(0, 0), (0, 0), *border]
        )

    if divisor is not None:
        return total(x, pads) / divisor
    inside = jnp.ones((1, 1, *x.shape[2:]), x.dtype)
    if count_include_pad:  # padding counts, what ceil mode adds behind it does not
        inside = jnp.pad(inside, [(0, 0), (0, 0), *((p, p) for p in padding)], constant_values=1)
        rest = [(0, max(0, high - p)) for (_, high), p in zip(pads, padding, strict=True)]
        counts = total(inside, rest)
        return total(x, pads) / counts[(..., *(slice(0, n) for n in sizes))]
    return total(x, pads) / total(inside, pads)


@lowers(aten.avg_pool2d.default, context=True)
def _avg_pool(
    context: Context, x: Any, kernel: Any, stride: Any = (), padding: Any = (0,), ceil_mode: bool = False,
    count_include_pad: bool = True, divisor: int | None = None,
) -> Any:  # fmt: skip
    values = wide(x[None] if x.ndim == 3 else x)
    kernel, stride, padding, _ = _window(kernel, stride, padding, (1,), values)
    sizes = context.value().shape[-2:]
    result = _average(values, kernel, stride, padding, sizes, count_include_pad, divisor)
    return result[0] if x.ndim == 3 else result


@lowers(aten.avg_pool2d_backward.default, context=True)
def _avg_pool_backward(
    context: Context, gradient: Any, x: Any, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor: int | None,
) -> Any:  # fmt: skip
    single = x.ndim == 3
    values, gradient = wide(x[None] if single else x), wide(gradient[None] if single else gradient)
    kernel, stride, padding, _ = _window(kernel, stride, padding, (1,), values)

    def forward(z: Any) -> Any:
        return _average(z, kernel, stride, padding, gradient.shape[2:], count_include_pad, divisor)

    result = jax.linear_transpose(forward, jax.ShapeDtypeStruct(values.shape, values.dtype))(gradient)[0]
    return result[0] if single else result


@lowers(aten._adaptive_avg_pool2d.default)
def _adaptive_avg_pool(x: Any, sizes: Sequence[int]) -> Any:
    values = wide(x)
    for axis, count in zip((x.ndim - 2, x.ndim - 1), sizes, strict=True):
        size = x.shape[axis]
        parts = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
        means = [jnp.mean(jax.lax.slice_in_dim(values, a, b, axis=axis), axis, keepdims=True) for a, b in parts]
        values = jnp.concatenate(means, axis)
    return values
