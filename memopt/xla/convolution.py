"""Lowerings of convolutions and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from memopt.xla.table import Context, lowers, wide
from memopt.xla.windows import cut, in_parts, joined, many, parts_of

aten = torch.ops.aten


def _forward(x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    count = weight.ndim - 2
    letters = "".join("DHW"[-count:])
    numbers = jax.lax.conv_dimension_numbers(x.shape, weight.shape, ("NC" + letters, "OI" + letters, "NC" + letters))
    return jax.lax.conv_general_dilated(
        x,
        weight,
        many(stride, count),
        [(p, p) for p in many(padding, count)],
        rhs_dilation=many(dilation, count),
        dimension_numbers=numbers,
        feature_group_count=groups,
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 and not torch.backends.cudnn.allow_tf32 else None,
    )


def _convolve(
    x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int
) -> Any:
    if not transposed:
        return _forward(x, weight, stride, padding, dilation, groups)
    count = weight.ndim - 2
    sizes = [
        (size - 1) * s - 2 * p + d * (k - 1) + o + 1
        for size, s, p, d, k, o in zip(
            x.shape[2:], many(stride, count), many(padding, count), many(dilation, count), weight.shape[2:],
            many(output_padding, count), strict=True,
        )
    ]  # fmt: skip
    shape = jax.ShapeDtypeStruct((x.shape[0], weight.shape[1] * groups, *sizes), x.dtype)
    turned = jax.linear_transpose(lambda z: _forward(z, weight, stride, padding, dilation, groups), shape)
    return turned(x)[0]


@lowers(aten.convolution.default, context=True)
def _convolution(
    context: Context, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    single = x.ndim < weight.ndim

    def of(x: Any) -> Any:
        result = _convolve(x, weight, stride, padding, dilation, transposed, output_padding, groups)
        return result if bias is None else result + jnp.reshape(bias, (1, -1) + (1,) * (weight.ndim - 2))

    result = in_parts(context, of, x[None] if single else x)
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

    parts = 1 if context.parts == 1 else parts_of(x, context.parts)
    if parts == 1:
        dx, dw = both(gradient, x)
    else:

        def add(total: Any, part: tuple[Any, Any]) -> tuple[Any, Any]:
            dx, dw = both(*part)
            return None if dw is None else total + wide(dw), dx

        start = jnp.zeros_like(wide(weight)) if mask[1] else None
        dw, dx = jax.lax.scan(add, start, (cut(gradient, parts), cut(x, parts)))
        dx = None if dx is None else joined(dx)
    db = jnp.sum(wide(gradient), (0, *range(2, gradient.ndim))) if mask[2] else None
    return (dx[0] if single and dx is not None else dx), dw, db
