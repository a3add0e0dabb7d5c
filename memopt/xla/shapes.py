"""Lowerings of operators that show tensors in other shapes, take parts of them and put them together."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy
import torch

from memopt.xla.table import Context, LowerError, jax_dtype, lowers

aten = torch.ops.aten


# -- views ------------------------------------------------------------------------------------------------------------


@lowers(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(x: Any, shape: Sequence[Any]) -> Any:
    return jnp.reshape(x, tuple(shape))


@lowers(aten.view.dtype, context=True)
def _view_dtype(context: Context, x: Any, dtype: torch.dtype) -> Any:
    return x.view(jax_dtype(dtype))


@lowers(aten.expand.default)
def _expand(x: Any, shape: Sequence[Any], *, implicit: bool = False) -> Any:
    missing = len(shape) - x.ndim
    known = [size if place < missing or not _is_keep(size) else x.shape[place - missing] for place, size in
             enumerate(shape)]  # fmt: skip
    return jnp.broadcast_to(x, tuple(known))


def _is_keep(size: Any) -> bool:
    return isinstance(size, int) and size == -1


@lowers(aten.permute.default)
def _permute(x: Any, dims: Sequence[int]) -> Any:
    return jnp.transpose(x, tuple(dim % x.ndim for dim in dims))


@lowers(aten.transpose.int)
def _transpose(x: Any, a: int, b: int) -> Any:
    return jnp.swapaxes(x, a, b) if x.ndim else x


@lowers(aten.t.default)
def _t(x: Any) -> Any:
    return jnp.transpose(x)


@lowers(aten.unsqueeze.default)
def _unsqueeze(x: Any, dim: int) -> Any:
    return jnp.expand_dims(x, dim)


@lowers(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(x: Any, dims: int | Sequence[int] | None = None) -> Any:
    if not x.ndim:
        return x
    every = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    return jnp.squeeze(x, tuple(dim % x.ndim for dim in every if _is_one(x.shape[dim])))


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


@lowers(aten.as_strided.default, context=True)
def _as_strided(context: Context, x: Any, size: Any, stride: Any, offset: int | None = None) -> Any:
    before = context.argument(0)
    if not before.is_contiguous() or before.storage_offset() or not _fixed(x.shape):
        raise LowerError("reads a storage that is laid out otherwise than its elements")
    places = numpy.full(tuple(size), offset or 0)
    for axis, (length, step) in enumerate(zip(size, stride, strict=True)):
        shape = [1] * len(size)
        shape[axis] = length
        places = places + (numpy.arange(length) * step).reshape(shape)
    return jnp.reshape(x, -1)[places]


def _fixed(shape: Sequence[Any]) -> bool:
    return all(isinstance(size, int) for size in shape)


# -- parts and wholes -------------------------------------------------------------------------------------------------


def _along(x: Any, dim: int, part: Any) -> tuple[Any, ...]:
    index: list[Any] = [slice(None)] * x.ndim
    index[dim] = part
    return tuple(index)


def _span(x: Any, dim: int, start: Any, end: Any, step: int) -> slice:
    """A slice as PyTorch means it: an end beyond the axis is the axis's end."""
    size = x.shape[dim]
    if end is None or (isinstance(end, int) and (end == sys.maxsize or (isinstance(size, int) and end >= size))):
        end = size
    return slice(0 if start is None else start, end, step)


@lowers(aten.slice.Tensor, aten.slice_copy.Tensor)
def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x[_along(x, dim, _span(x, dim, start, end, step))]


@lowers(aten.slice_scatter.default)
def _slice_scatter(x: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x.at[_along(x, dim, _span(x, dim, start, end, step))].set(source)


@lowers(aten.slice_backward.default)
def _slice_backward(gradient: Any, shape: Sequence[Any], dim: int, start: Any, end: Any, step: int) -> Any:
    return _slice_scatter(jnp.zeros(tuple(shape), gradient.dtype), gradient, dim, start, end, step)


@lowers(aten.select.int)
def _select(x: Any, dim: int, index: int) -> Any:
    return x[_along(x, dim, index)]


@lowers(aten.select_scatter.default)
def _select_scatter(x: Any, source: Any, dim: int, index: int) -> Any:
    return x.at[_along(x, dim, index)].set(source)


@lowers(aten.select_backward.default)
def _select_backward(gradient: Any, shape: Sequence[Any], dim: int, index: int) -> Any:
    return _select_scatter(jnp.zeros(tuple(shape), gradient.dtype), gradient, dim, index)


@lowers(aten.cat.default, context=True)
def _cat(context: Context, parts: Sequence[Any], dim: int = 0) -> Any:
    kept = [part for part in parts if part.shape != (0,)]
    dtype = jax_dtype(context.value().dtype)
    return jnp.concatenate([part.astype(dtype) for part in kept or parts[:1]], dim if kept else 0)


@lowers(aten.stack.default)
def _stack(parts: Sequence[Any], dim: int = 0) -> Any:
    return jnp.stack(list(parts), dim)


@lowers(aten.split.Tensor)
def _split(x: Any, size: int, dim: int = 0) -> Any:
    return [_slice(x, dim, start, start + size) for start in range(0, x.shape[dim], size)] or [x]


@lowers(aten.split_with_sizes.default)
def _split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    ends = numpy.cumsum(sizes)
    return [_slice(x, dim, int(end) - size, int(end)) for end, size in zip(ends, sizes, strict=True)]


@lowers(aten.unbind.int)
def _unbind(x: Any, dim: int = 0) -> Any:
    return [_select(x, dim, index) for index in range(x.shape[dim])]


@lowers(aten.repeat.default)
def _repeat(x: Any, repeats: Sequence[Any]) -> Any:
    return jnp.tile(x, tuple(repeats))


@lowers(aten.constant_pad_nd.default)
def _constant_pad(x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    pairs = [(pad[2 * i], pad[2 * i + 1], 0) for i in range(len(pad) // 2)]
    config = [(0, 0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]
    return jax.lax.pad(x, jnp.asarray(value).astype(x.dtype), config)


@lowers(aten.flip.default)
def _flip(x: Any, dims: Sequence[int]) -> Any:
    return jnp.flip(x, tuple(dims))


@lowers(aten.roll.default)
def _roll(x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@lowers(aten.tril.default)
def _tril(x: Any, diagonal: int = 0) -> Any:
    return jnp.tril(x, diagonal)


@lowers(aten.triu.default)
def _triu(x: Any, diagonal: int = 0) -> Any:
    return jnp.triu(x, diagonal)
