"""Lowerings of operators that make tensors, move or select their elements, and reduce them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy
import torch

from memopt.xla.table import Context, LowerError, jax_dtype, lowers, wide

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


@lowers(aten.slice.Tensor)
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


# -- by index ---------------------------------------------------------------------------------------------------------


@lowers(aten.index.Tensor)
def _index(x: Any, indices: Sequence[Any]) -> Any:
    return x[tuple(slice(None) if index is None else index for index in indices)]


@lowers(aten.index_put.default)
def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    masks = [index for index in indices if index is not None and index.dtype == jnp.bool_]
    if masks:
        if len(indices) > 1 or values.size != 1:
            raise LowerError("a mask selects how many values are written: its shape depends on data")
        mask = jnp.reshape(masks[0], (*masks[0].shape, *(1,) * (x.ndim - masks[0].ndim)))
        return jnp.where(mask, (x if accumulate else 0) + jnp.reshape(values, ()), x)
    place = x.at[tuple(slice(None) if index is None else index for index in indices)]
    return place.add(values) if accumulate else place.set(values)


@lowers(aten.index_select.default)
def _index_select(x: Any, dim: int, index: Any) -> Any:
    return jnp.take(x, index, dim) if x.ndim else x


def _places(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    places = []
    for axis in range(x.ndim):
        shape = [1] * x.ndim
        shape[axis] = index.shape[axis]
        places.append(index if axis == dim % x.ndim else jnp.arange(index.shape[axis]).reshape(shape))
    return tuple(places)


@lowers(aten.gather.default)
def _gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    return x[_places(x, dim, index)] if x.ndim else jnp.broadcast_to(x, index.shape)


@lowers(aten.scatter.src)
def _scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    if not x.ndim:
        return jnp.reshape(source, ())
    return x.at[_places(x, dim, index)].set(source[tuple(slice(0, size) for size in index.shape)])


@lowers(aten.scatter.value)
def _scatter_value(x: Any, dim: int, index: Any, value: Any) -> Any:
    return x.at[_places(x, dim, index)].set(value) if x.ndim else jnp.full_like(x, value)


@lowers(aten.scatter_add.default)
def _scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    if not x.ndim:
        return x + jnp.sum(source)
    return x.at[_places(x, dim, index)].add(source[tuple(slice(0, size) for size in index.shape)])


@lowers(aten.embedding.default)
def _embedding(weight: Any, index: Any, padding_idx: int = -1, scale: bool = False, sparse: bool = False) -> Any:
    return jnp.take(weight, index, axis=0)


@lowers(aten.embedding_dense_backward.default)
def _embedding_backward(gradient: Any, index: Any, rows: int, padding_idx: int, scale: bool) -> Any:
    if scale:
        raise LowerError("scale_grad_by_freq has no form under XLA")
    flat, places = jnp.reshape(wide(gradient), (-1, gradient.shape[-1])), jnp.reshape(index, -1)
    if padding_idx >= 0:
        flat = jnp.where((places == padding_idx)[:, None], 0, flat)
    return jnp.zeros((rows, gradient.shape[-1]), flat.dtype).at[places].add(flat)


# -- new tensors ------------------------------------------------------------------------------------------------------


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
