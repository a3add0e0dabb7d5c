"""Lowerings of operators that read and write elements whose places are in other tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch

from memopt.xla.table import LowerError, lowers, wide

aten = torch.ops.aten


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
