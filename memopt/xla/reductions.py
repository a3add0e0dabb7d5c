"""Lowerings of reductions, scans, sorts and matrix products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from memopt.xla.table import HALVES, Context, jax_dtype, lowers, wide

aten = torch.ops.aten
_ALIGNED = 8  # elements of a half type in a vector of 16 bytes


def _axes(x: Any, dim: Any) -> tuple[int, ...] | None:
    if dim is None or (not isinstance(dim, int) and not dim) or not x.ndim:
        return None
    return (dim % x.ndim,) if isinstance(dim, int) else tuple(d % x.ndim for d in dim)


@lowers(aten.sum.default, aten.sum.dim_IntList, context=True)
def _sum(context: Context, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return jnp.sum(wide(x.astype(jax_dtype(context.value().dtype))), _axes(x, dim), keepdims=keepdim)


@lowers(aten.mean.default, aten.mean.dim, context=True)
def _mean(context: Context, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return jnp.mean(wide(x.astype(jax_dtype(context.value().dtype))), _axes(x, dim), keepdims=keepdim)


@lowers(aten.prod.default, aten.prod.dim_int, context=True)
def _prod(context: Context, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return jnp.prod(wide(x.astype(jax_dtype(context.value().dtype))), _axes(x, dim), keepdims=keepdim)


@lowers(aten.var.correction)
def _var(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return jnp.var(wide(x), _axes(x, dim), ddof=1 if correction is None else correction, keepdims=keepdim)


@lowers(aten.var_mean.correction)
def _var_mean(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _var(x, dim, correction=correction, keepdim=keepdim), jnp.mean(wide(x), _axes(x, dim), keepdims=keepdim)


@lowers(aten.amax.default)
def _amax(x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return jnp.max(x, _axes(x, dim), keepdims=keepdim)


@lowers(aten.amin.default)
def _amin(x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return jnp.min(x, _axes(x, dim), keepdims=keepdim)


@lowers(aten.max.default)
def _max(x: Any) -> Any:
    return jnp.max(x)


@lowers(aten.min.default)
def _min(x: Any) -> Any:
    return jnp.min(x)


@lowers(aten.argmax.default)
def _argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmax(x, dim if x.ndim else None, keepdims=keepdim)


@lowers(aten.argmin.default)
def _argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmin(x, dim if x.ndim else None, keepdims=keepdim)


@lowers(aten.max.dim)
def _max_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    return _amax(x, dim, keepdim), _argmax(x, dim, keepdim)


@lowers(aten.min.dim)
def _min_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    return _amin(x, dim, keepdim), _argmin(x, dim, keepdim)


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def _any(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.any(x, _axes(x, dim), keepdims=keepdim)


@lowers(aten.all.default, aten.all.dim, aten.all.dims)
def _all(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.all(x, _axes(x, dim), keepdims=keepdim)


@lowers(aten.cumsum.default, context=True)
def _cumsum(context: Context, x: Any, dim: int, *, dtype: Any = None) -> Any:
    x = wide(x.astype(jax_dtype(context.value().dtype)))
    return jnp.cumsum(x, dim) if x.ndim else x


@lowers(aten.cumprod.default, context=True)
def _cumprod(context: Context, x: Any, dim: int, *, dtype: Any = None) -> Any:
    x = wide(x.astype(jax_dtype(context.value().dtype)))
    return jnp.cumprod(x, dim) if x.ndim else x


@lowers(aten.sort.default, aten.sort.stable)
def _sort(x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int32)
    order = jnp.argsort(x, dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


@lowers(aten.topk.default)
def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, is_sorted: bool = True) -> Any:
    values, order = _sort(x, dim, largest)
    if not x.ndim:
        return values, order
    return jax.lax.slice_in_dim(values, 0, k, axis=dim), jax.lax.slice_in_dim(order, 0, k, axis=dim)


@lowers(aten._softmax.default)
def _softmax(x: Any, dim: int, half_to_float: bool = False) -> Any:
    return jax.nn.softmax(wide(x), dim) if x.ndim else jnp.ones_like(x)


@lowers(aten._safe_softmax.default)
def _safe_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    hidden = jnp.all(x == -jnp.inf, dim, keepdims=True)
    return jnp.where(hidden, 0, jax.nn.softmax(jnp.where(hidden, 0, wide(x)), dim))


@lowers(aten._log_softmax.default)
def _log_softmax(x: Any, dim: int, half_to_float: bool = False) -> Any:
    return jax.nn.log_softmax(wide(x), dim) if x.ndim else jnp.zeros_like(x)


# -- products ---------------------------------------------------------------------------------------------------------


def product(x: Any, y: Any, accumulate: Any = None) -> Any:
    """`x @ y`: float32 in full float32 (never TF32), half types summed in float32."""
    exact = x.dtype in (jnp.float32, jnp.float64)
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST if exact else None, preferred_element_type=accumulate)


@lowers(aten.mm.default, context=True)
def _mm(context: Context, x: Any, y: Any) -> Any:
    rows = x.shape[0]
    if context.platform == "cuda" and x.dtype in HALVES and min(*x.shape, *y.shape) >= _ALIGNED:
        x, y = _aligned(x, y, *(_is_turned(node) for node in context.node.args))
    return product(x, y)[:rows]


def _is_turned(node: Any) -> bool:
    """Whether a matrix is another one with its axes exchanged: its rows are not what lies together in memory."""
    return node.target in (aten.t.default, aten.permute.default, aten.transpose.int)


def _aligned(x: Any, y: Any, x_turned: bool, y_turned: bool) -> tuple[Any, Any]:
    """Operands with zeros behind what lies together in memory, up to whole vectors of the fast kernels.

    XLA does so for cuBLAS alone, not where it may take a kernel of its own. Columns of `y` are left as they are: the
    result would have to be copied.
    """
    inner, rows = -x.shape[1] % _ALIGNED, -x.shape[0] % _ALIGNED
    inner = inner if not x_turned or y_turned else 0
    rows = rows if x_turned else 0
    if inner or rows:
        x = jnp.pad(x, ((0, rows), (0, inner)))
        y = jnp.pad(y, ((0, inner), (0, 0)))
    return x, y


@lowers(aten.bmm.default)
def _bmm(x: Any, y: Any) -> Any:
    return product(x, y)


@lowers(aten.addmm.default, aten.baddbmm.default, aten.addmv.default, context=True)
def _addmm(context: Context, bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    if context.platform == "cuda" and x.dtype in HALVES and x.dtype == bias.dtype and alpha == beta == 1:
        return product(x, y) + bias  # in this form XLA's kernels take the bias in, and nothing in float32 is stored
    result = product(x, y, jnp.promote_types(x.dtype, jnp.float32) if floating else None)
    result = result if alpha == 1 else result * alpha
    if beta == 0:
        return result
    return result + (wide(bias) if beta == 1 else wide(bias) * beta)


@lowers(aten._addmm_activation.default, context=True)
def _addmm_activation(
    context: Context, bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
) -> Any:
    # PyTorch writes this out with its operands in float32, and so multiplies in float32.
    result = _addmm(context, bias, x, y, beta=beta, alpha=alpha)
    if not use_gelu:
        return jax.nn.relu(result)
    return jax.nn.gelu(wide(result), approximate=context.value().device.type == "cuda")


@lowers(aten.mv.default, aten.dot.default)
def _mv(x: Any, y: Any) -> Any:
    return product(x, y)
