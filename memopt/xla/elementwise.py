"""Lowerings of elementwise operators."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from memopt.xla.table import Context, jax_dtype, lowers, wide

aten = torch.ops.aten


def _plain(function: Any, *operators: Any) -> None:
    """Enter a function of operands alone; half types are computed in float32, scalars are never rounded to them."""
    lowers(*operators)(lambda *operands: function(*(wide(operand) for operand in operands)))


def _floating(function: Any, *operators: Any) -> None:
    """The same for functions whose result is floating-point whatever the operand."""

    def lowering(context: Context, *operands: Any) -> Any:
        compute = jnp.promote_types(jax_dtype(context.value().dtype), jnp.float32)
        return function(*(o.astype(compute) if isinstance(o, jax.Array) else o for o in operands))

    lowers(*operators, context=True)(lowering)


_function: Any
for _function, _operator in [
    (jnp.abs, aten.abs.default), (jnp.negative, aten.neg.default), (jnp.floor, aten.floor.default),
    (jnp.ceil, aten.ceil.default), (jnp.trunc, aten.trunc.default), (jnp.round, aten.round.default),
    (jnp.sign, aten.sign.default), (jnp.logical_not, aten.logical_not.default),
    (jnp.bitwise_not, aten.bitwise_not.default), (jnp.isnan, aten.isnan.default), (jnp.isinf, aten.isinf.default),
    (jnp.isfinite, aten.isfinite.default), (jnp.square, aten.square.default),
]:  # fmt: skip
    _plain(_function, _operator)

for _function, _operator in [
    (jnp.exp, aten.exp.default), (jnp.exp2, aten.exp2.default), (jnp.expm1, aten.expm1.default),
    (jnp.log, aten.log.default), (jnp.log1p, aten.log1p.default), (jnp.log2, aten.log2.default),
    (jnp.log10, aten.log10.default), (jnp.sqrt, aten.sqrt.default), (jax.lax.rsqrt, aten.rsqrt.default),
    (jnp.reciprocal, aten.reciprocal.default), (jnp.sin, aten.sin.default), (jnp.cos, aten.cos.default),
    (jnp.tan, aten.tan.default), (jnp.sinh, aten.sinh.default), (jnp.cosh, aten.cosh.default),
    (jnp.tanh, aten.tanh.default), (jnp.arcsin, aten.asin.default), (jnp.arccos, aten.acos.default),
    (jnp.arctan, aten.atan.default), (jax.nn.sigmoid, aten.sigmoid.default), (jax.lax.erf, aten.erf.default),
    (jax.lax.erfc, aten.erfc.default), (jnp.divide, aten.div.Tensor), (jnp.divide, aten.div.Scalar),
    (jnp.arctan2, aten.atan2.default),
]:  # fmt: skip
    _floating(_function, _operator)

for _function, _packet in [
    (jnp.equal, aten.eq), (jnp.not_equal, aten.ne), (jnp.less, aten.lt), (jnp.less_equal, aten.le),
    (jnp.greater, aten.gt), (jnp.greater_equal, aten.ge), (jnp.bitwise_and, aten.bitwise_and),
    (jnp.bitwise_or, aten.bitwise_or), (jnp.bitwise_xor, aten.bitwise_xor), (jnp.multiply, aten.mul),
    (jnp.remainder, aten.remainder), (jnp.fmod, aten.fmod),
]:  # fmt: skip
    _plain(_function, _packet.Tensor, _packet.Scalar)

_plain(jnp.maximum, aten.maximum.default)
_plain(jnp.minimum, aten.minimum.default)
_plain(jnp.logical_and, aten.logical_and.default)
_plain(jnp.logical_or, aten.logical_or.default)
_plain(jnp.logical_xor, aten.logical_xor.default)
for _function, _packet in [
    (jnp.left_shift, aten.bitwise_left_shift), (jnp.right_shift, aten.bitwise_right_shift),
]:  # fmt: skip
    _plain(_function, _packet.Tensor, _packet.Tensor_Scalar)


@lowers(aten.where.self)
def _where(condition: Any, x: Any, y: Any) -> Any:
    return jnp.where(condition, x, y)


lowers(aten.relu.default)(jax.nn.relu)  # exact in any type


@lowers(aten.add.Tensor, aten.add.Scalar)
def _add(x: Any, y: Any, alpha: Any = 1) -> Any:
    if alpha == 1 and isinstance(y, jax.Array) and x.dtype == y.dtype:
        return x + y  # rounded once either way; XLA's patterns for convolutions know it in this form
    return wide(x) + (wide(y) if alpha == 1 else wide(y) * alpha)


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def _sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return wide(x) - (wide(y) if alpha == 1 else wide(y) * alpha)


@lowers(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return _sub(y, x, alpha)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode, context=True)
def _div(context: Context, x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    x, y = wide(x), wide(y)
    if rounding_mode is None:
        compute = jnp.promote_types(jax_dtype(context.value().dtype), jnp.float32)
        return jnp.asarray(x, compute) / jnp.asarray(y, compute)
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    if jnp.issubdtype(jax_dtype(context.value().dtype), jnp.integer):
        kind = jnp.result_type(x, y)
        return jax.lax.div(*jnp.broadcast_arrays(jnp.asarray(x, kind), jnp.asarray(y, kind)))
    return jnp.trunc(x / y)


@lowers(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar, context=True)
def _pow(context: Context, x: Any, y: Any) -> Any:
    compute = jax_dtype(context.value().dtype)
    if compute in (jnp.float16, jnp.bfloat16):
        compute = jnp.dtype(jnp.float32)
    if isinstance(y, (int, float)) and float(y).is_integer() and abs(y) <= 64:
        return jax.lax.integer_pow(jnp.asarray(x, compute), int(y))
    if isinstance(y, float) and y == 0.5:
        return jnp.sqrt(jnp.asarray(x, compute))
    return jnp.power(jnp.asarray(x, compute), jnp.asarray(y, compute))


@lowers(aten.clamp.default, aten.clamp.Tensor, context=True)
def _clamp(context: Context, x: Any, low: Any = None, high: Any = None) -> Any:
    compute = jnp.promote_types(jax_dtype(context.value().dtype), x.dtype)
    x = wide(x.astype(compute))
    if low is not None:
        x = jnp.maximum(x, wide(low))
    return x if high is None else jnp.minimum(x, wide(high))


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor, context=True)
def _clamp_min(context: Context, x: Any, low: Any) -> Any:
    return _clamp(context, x, low)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor, context=True)
def _clamp_max(context: Context, x: Any, high: Any) -> Any:
    return _clamp(context, x, None, high)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, jnp.asarray(value).astype(x.dtype), x)


@lowers(aten.gelu.default)
def _gelu(x: Any, *, approximate: str = "none") -> Any:
    return jax.nn.gelu(wide(x), approximate=approximate == "tanh")


@lowers(aten.silu.default)
def _silu(x: Any) -> Any:
    return jax.nn.silu(wide(x))


@lowers(aten.hardsigmoid.default)
def _hardsigmoid(x: Any) -> Any:
    return jnp.clip(wide(x) + 3.0, 0.0, 6.0) / 6.0


@lowers(aten.hardswish.default)
def _hardswish(x: Any) -> Any:
    return wide(x) * _hardsigmoid(x)


@lowers(aten.threshold_backward.default)
def _threshold_backward(gradient: Any, x: Any, threshold: Any) -> Any:
    return jnp.where(x <= threshold, jnp.zeros_like(gradient), gradient)


@lowers(aten._to_copy.default, torch.ops.prims.convert_element_type.default, context=True)
def _to_copy(context: Context, x: Any, *dtype: Any, **layout: Any) -> Any:
    return x.astype(jax_dtype(context.value().dtype))


@lowers(
    aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, aten.view_as.default,
    aten.contiguous.default,
)  # fmt: skip
def _same(x: Any, *ignored: Any, **layout: Any) -> Any:
    return x


@lowers(aten.copy.default)
def _copy(x: Any, source: Any, *ignored: Any) -> Any:
    return jnp.broadcast_to(source, x.shape).astype(x.dtype)


@lowers(aten.fill.Scalar, aten.fill.Tensor)
def _fill(x: Any, value: Any) -> Any:
    return jnp.full_like(x, value)
