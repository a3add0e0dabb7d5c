"""Lowerings of convolutions, normalizations and pooling, with their backward operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from memopt.xla.table import Context, lowers, wide

aten = torch.ops.aten


# -- convolution ------------------------------------------------------------------------------------------------------


def _many(value: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(value) * count if len(value) == 1 else tuple(value)


def _forward(x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    count = weight.ndim - 2
    letters = "".join("DHW"[-count:])
    numbers = jax.lax.conv_dimension_numbers(x.shape, weight.shape, ("NC" + letters, "OI" + letters, "NC" + letters))
    return jax.lax.conv_general_dilated(
        x,
        weight,
        _many(stride, count),
        [(p, p) for p in _many(padding, count)],
        rhs_dilation=_many(dilation, count),
        dimension_numbers=numbers,
        feature_group_count=groups,
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 and not _tf32() else None,
    )


def _tf32() -> bool:
    return bool(torch.backends.cudnn.allow_tf32)


def _convolve(
    x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int
) -> Any:
    if not transposed:
        return _forward(x, weight, stride, padding, dilation, groups)
    count = weight.ndim - 2
    sizes = [
        (size - 1) * s - 2 * p + d * (k - 1) + o + 1
        for size, s, p, d, k, o in zip(
            x.shape[2:], _many(stride, count), _many(padding, count), _many(dilation, count), weight.shape[2:],
            _many(output_padding, count), strict=True,
        )
    ]  # fmt: skip
    shape = jax.ShapeDtypeStruct((x.shape[0], weight.shape[1] * groups, *sizes), x.dtype)
    turned = jax.linear_transpose(lambda z: _forward(z, weight, stride, padding, dilation, groups), shape)
    return turned(x)[0]


def _parts(x: Any, most: int) -> int:
    """How many equal parts of two images or more a batch is run in, `most` at most."""
    return max(n for n in range(1, max(1, min(most, x.shape[0] // 2)) + 1) if x.shape[0] % n == 0)


def _cut(x: Any, parts: int) -> Any:
    return jnp.reshape(x, (parts, x.shape[0] // parts, *x.shape[1:]))


def _joined(x: Any) -> Any:
    return jnp.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))


def _in_parts(context: Context, function: Any, *given: Any) -> Any:
    """The function of arrays whose first axis is the batch: of all at once, or of one part after another."""
    parts = 1 if context.parts == 1 else _parts(given[0], context.parts)
    if parts == 1:
        return function(*given)
    found = jax.lax.map(lambda part: function(*part), tuple(_cut(x, parts) for x in given))
    return jax.tree.map(_joined, found)


@lowers(aten.convolution.default, context=True)
def _convolution(
    context: Context, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    single = x.ndim < weight.ndim

    def of(x: Any) -> Any:
        result = _convolve(x, weight, stride, padding, dilation, transposed, output_padding, groups)
        return result if bias is None else result + jnp.reshape(bias, (1, -1) + (1,) * (weight.ndim - 2))

    result = _in_parts(context, of, x[None] if single else x)
    return result[0] if single else result


@lowers(aten.convolution_backward.default, context=True)
def _convolution_backward(
    context: Context, gradient: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, mask: Sequence[bool],
) -> Any:  # fmt: skip
    single = x.ndim < weight.ndim
    gradient, x = (gradient[None], x[None]) if single else (gradient, x)

    def of(x: Any, weight: Any) -> Any:
        return _convolve(x, weight, stride, padding, dilation, transposed, output_padding, groups)

    def both(gradient: Any, x: Any) -> tuple[Any, Any]:
        dx = jax.vjp(lambda z: of(z, weight), x)[1](gradient)[0] if mask[0] else None
        return dx, jax.vjp(lambda w: of(x, w), weight)[1](gradient)[0] if mask[1] else None

    parts = 1 if context.parts == 1 else _parts(x, context.parts)
    if parts == 1:
        dx, dw = both(gradient, x)
    else:

        def add(total: Any, part: tuple[Any, Any]) -> tuple[Any, Any]:
            dx, dw = both(*part)
            return None if dw is None else total + wide(dw), dx

        start = jnp.zeros_like(wide(weight)) if mask[1] else None
        dw, dx = jax.lax.scan(add, start, (_cut(gradient, parts), _cut(x, parts)))
        dx = None if dx is None else _joined(dx)
    db = jnp.sum(wide(gradient), (0, *range(2, gradient.ndim))) if mask[2] else None
    return (dx[0] if single and dx is not None else dx), dw, db


# -- normalization ----------------------------------------------------------------------------------------------------


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


# -- pooling ----------------------------------------------------------------------------------------------------------


def _pads(x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Padding per spatial axis, so that windows give `sizes` results (ceil mode takes more at the end)."""
    spans = zip(x.shape[2:], kernel, stride, padding, dilation, sizes, strict=True)
    return [(p, max(0, (n - 1) * s + d * (k - 1) + 1 - size - p)) for size, k, s, p, d, n in spans]


def _window(kernel: Any, stride: Any, padding: Any, dilation: Any, x: Any) -> tuple[Any, ...]:
    count = x.ndim - 2
    kernel = _many(kernel, count)
    return kernel, _many(stride, count) if stride else kernel, _many(padding, count), _many(dilation, count)


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

    found, where = _in_parts(context, pool, values)
    return (found[0], where[0]) if single else (found, where)


@lowers(aten.max_pool2d_with_indices_backward.default, context=True)
def _max_pool_backward(
    context: Context, gradient: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool,
    places: Any,
) -> Any:  # fmt: skip
    size = x.shape[-2] * x.shape[-1]

    def back(gradient: Any, places: Any) -> Any:
        flat = jnp.reshape(wide(gradient), (-1, gradient.shape[-2] * gradient.shape[-1]))
        row = jnp.arange(flat.shape[0])[:, None]
        added = jnp.zeros((flat.shape[0], size), flat.dtype).at[row, jnp.reshape(places, flat.shape)].add(flat)
        return jnp.reshape(added, (*gradient.shape[:-2], *x.shape[-2:])).astype(gradient.dtype)

    return back(gradient, places) if x.ndim == 3 else _in_parts(context, back, gradient, places)


def _average(
    x: Any, kernel: Any, stride: Any, padding: Any, sizes: Any, count_include_pad: bool, divisor: int | None
) -> Any:
    pads = _pads(x, kernel, stride, padding, (1,) * len(kernel), sizes)
    window, steps = (1, 1, *kernel), (1, 1, *stride)

    def total(values: Any, border: Any) -> Any:
        return jax.lax.reduce_window(
            values, jnp.zeros((), values.dtype), jax.lax.add, window, steps, [(0, 0), (0, 0), *border]
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
