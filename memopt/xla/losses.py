"""Lowerings of gradients of losses."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch

from memopt.xla.table import lowers, wide

aten = torch.ops.aten
_MEAN = 1


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_backward(
    gradient: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int, total_weight: Any
) -> Any:
    """Each element is compared with its target: nothing is scattered, so that what reads the result can absorb it."""
    axis = 0 if x.ndim < 2 else 1
    places = jnp.expand_dims(target, axis)
    gradient = wide(gradient) / wide(total_weight) if reduction == _MEAN else wide(gradient)
    if gradient.ndim:
        gradient = jnp.expand_dims(gradient, axis)
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    if weight is not None:
        gradient = gradient * jnp.reshape(wide(weight), shape)
    hit = (jnp.reshape(jnp.arange(x.shape[axis], dtype=target.dtype), shape) == places) & (places != ignored)
    return jnp.where(hit, -gradient, 0)
