"""Lowerings of fused attention, forward and backward: `jax.nn.dot_product_attention` wherever it can be used.

PyTorch's operators lay heads before positions (B, H, T, D); JAX's function has them behind (B, T, H, D).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch

from memopt.xla.table import HALVES, Context, LowerError, lowers, random_key, wide

aten = torch.ops.aten


def _turn(x: Any) -> Any:
    return jnp.swapaxes(x, 1, 2)


def _split(mask: Any) -> dict[str, Any]:
    """An additive or a boolean mask as JAX's function takes it."""
    if mask is None:
        return {}
    while mask.ndim < 4:
        mask = mask[None]
    return {"mask": mask} if mask.dtype == jnp.bool_ else {"bias": mask}


def _fused(context: Context, q: Any, *masks: Any) -> str | None:
    """CuDNN's kernel where it can be had: half types on CUDA, head sizes that are multiples of 8 up to 128."""
    wanted = context.platform == "cuda" and q.dtype in HALVES and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
    return "cudnn" if wanted and all(mask is None for mask in masks) else "xla"


def _attend(context: Context, q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else None):  # else TF32 on CUDA
        return _turn(
            jax.nn.dot_product_attention(
                _turn(q), _turn(k), _turn(v), **_split(mask), scale=scale, is_causal=causal,
                implementation=_fused(context, q, mask),
            )
        )  # fmt: skip


def _logits(q: Any, k: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    highest = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    result = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32),
                        precision=highest) * scale  # fmt: skip
    for name, value in _split(mask).items():
        result = jnp.where(value, result, -jnp.inf) if name == "mask" else result + wide(value)
    if causal:
        seen = jnp.tril(jnp.ones(result.shape[-2:], bool))
        result = jnp.where(seen, result, -jnp.inf)
    return result


def _with_lse(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None, drop: Any) -> tuple[Any, Any]:
    """The attention and its log-sum-exp, shaped (B, H, T); `drop` scales probabilities."""
    k, v = _heads(q, k), _heads(q, v)
    logits = _logits(q, k, mask, causal, scale)
    lse = jax.nn.logsumexp(logits, -1)
    shares = _shares(logits, lse) * drop
    return jnp.einsum("bhts,bhsd->bhtd", shares.astype(v.dtype), v, precision=_exact(v)), lse


def _exact(x: Any) -> Any:
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def _shares(logits: Any, lse: Any) -> Any:
    """Probabilities; those of a row that sees nothing are 0."""
    return jnp.where(lse[..., None] == -jnp.inf, 0, jnp.exp(logits - lse[..., None]))


def _heads(q: Any, k: Any) -> Any:
    return k if q.shape[1] == k.shape[1] else jnp.repeat(k, q.shape[1] // k.shape[1], 1)


def _needed(context: Context, index: int) -> bool:
    """Whether a result of the node is read."""
    return any(user.args[1] == index and user.users for user in context.node.users)


def _keep(data: Any, shape: tuple[Any, ...], p: float) -> Any:
    """What dropout multiplies probabilities by: 0 or 1/(1-p)."""
    return jax.random.bernoulli(random_key(data), 1 - p, shape) / (1 - p)


def _forward(
    context: Context, q: Any, k: Any, v: Any, mask: Any, p: float, causal: bool, scale: float | None, data: Any = None
) -> tuple[Any, Any]:
    if p == 0 and not _needed(context, 1):
        return _attend(context, q, k, v, mask, causal, scale), None
    if p == 0 and _fused(context, q, mask) == "cudnn":
        # The backward operator differentiates the fused kernel again and has no use for the log-sum-exp.
        shape = context.value(1).shape
        return _attend(context, q, k, v, mask, causal, scale), jnp.zeros(tuple(shape), jnp.float32)
    drop = 1 if p == 0 else _keep(data, (*q.shape[:3], k.shape[2]), p)
    return _with_lse(q, k, v, mask, causal, scale, drop)


def _backward(
    context: Context, gradient: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, lse: Any, p: float, causal: bool,
    scale: float | None, data: Any = None,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Gradients of q, k, v and an additive mask."""
    if p == 0 and _fused(context, q, mask) == "cudnn":
        _, pull = jax.vjp(lambda q, k, v: _attend(context, q, k, v, mask, causal, scale), q, k, v)
        return (*pull(gradient), None)
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v = _heads(q, k), _heads(q, v)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    shares = _shares(_logits(q, wide_k, mask, causal, scale), lse[..., : q.shape[2]])
    drop = 1 if p == 0 else _keep(data, shares.shape, p)

    def product(letters: str, x: Any, y: Any) -> Any:
        total = jnp.promote_types(q.dtype, jnp.float32)
        return jnp.einsum(letters, x.astype(q.dtype), y, preferred_element_type=total, precision=_exact(q))

    dv = product("bhts,bhtd->bhsd", shares * drop, gradient)
    ds = product("bhtd,bhsd->bhts", gradient, wide_v) * drop
    ds = shares * (ds - jnp.sum(wide(gradient) * wide(out), -1, keepdims=True))
    dq = product("bhts,bhsd->bhtd", ds, wide_k) * factor
    dk = product("bhts,bhtd->bhsd", ds, q) * factor
    if groups > 1:
        dk, dv = (jnp.sum(jnp.reshape(d, (d.shape[0], -1, groups, *d.shape[2:])), 2) for d in (dk, dv))
    return dq, dk, dv, ds


def _seed(context: Context, p: float) -> Any:
    return None if p == 0 else jax.random.key_data(context.key())[:2]


def _packed(data: Any) -> tuple[Any, Any]:
    """A key as the two 64-bit numbers that PyTorch hands from forward to backward (seed and offset)."""
    if data is None:
        return jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    return data[0], data[1]


def _unpacked(seed: Any, offset: Any, p: float) -> Any:
    return None if p == 0 else jnp.stack([jnp.reshape(seed, ()), jnp.reshape(offset, ())]).astype(jnp.uint32)


# -- one entry per operator -------------------------------------------------------------------------------------------


@lowers(aten._scaled_dot_product_flash_attention_for_cpu.default, context=True)
def _cpu(
    context: Context, q: Any, k: Any, v: Any, p: float = 0.0, causal: bool = False, *, attn_mask: Any = None,
    scale: float | None = None,
) -> Any:  # fmt: skip
    if p != 0:
        raise LowerError("this form of attention has no dropout")
    return _forward(context, q, k, v, attn_mask, p, causal, scale)


@lowers(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, context=True)
def _cpu_backward(
    context: Context, gradient: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, p: float, causal: bool, *,
    attn_mask: Any = None, scale: float | None = None,
) -> Any:  # fmt: skip
    return _backward(context, gradient, q, k, v, attn_mask, out, lse, p, causal, scale)[:3]


@lowers(aten._scaled_dot_product_flash_attention.default, context=True)
def _flash(
    context: Context, q: Any, k: Any, v: Any, p: float = 0.0, causal: bool = False, debug: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    data = _seed(context, p)
    out, lse = _forward(context, q, k, v, None, p, causal, scale, data)
    state = jnp.zeros((2,), jnp.uint32) if data is None else data
    values = [context.value(index) for index in (4, 5)]
    return out, lse, None, None, *values, state, jnp.zeros((), jnp.int32), None


@lowers(aten._scaled_dot_product_flash_attention_backward.default, context=True)
def _flash_backward(
    context: Context, gradient: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cq: Any, ck: Any, mq: Any, mk: Any,
    p: float, causal: bool, state: Any, unused: Any, *, scale: float | None = None,
) -> Any:  # fmt: skip
    data = None if p == 0 else jnp.reshape(state, (2,)).astype(jnp.uint32)
    return _backward(context, gradient, q, k, v, None, out, lse, p, causal, scale, data)[:3]


@lowers(aten._scaled_dot_product_efficient_attention.default, context=True)
def _efficient(
    context: Context, q: Any, k: Any, v: Any, bias: Any, with_lse: bool, p: float = 0.0, causal: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    data = _seed(context, p)
    out, lse = _forward(context, q, k, v, bias, p, causal, scale, data)
    if lse is not None:  # its rows are padded to the kernel's tile
        lse = jnp.pad(lse, [(0, 0), (0, 0), (0, context.value(1).shape[2] - lse.shape[2])])
    return out, lse, *_packed(data)


@lowers(aten._scaled_dot_product_efficient_attention_backward.default, context=True)
def _efficient_backward(
    context: Context, gradient: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, seed: Any, offset: Any,
    p: float, mask: Any, causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    data = _unpacked(seed, offset, p)
    dq, dk, dv, ds = _backward(context, gradient, q, k, v, bias, out, lse, p, causal, scale, data)
    if not mask[3] or bias is None:
        return dq, dk, dv, None
    axes = tuple(axis for axis in range(4) if bias.shape[axis] == 1 and ds.shape[axis] != 1)
    return dq, dk, dv, jnp.sum(ds, axes, keepdims=True)


@lowers(aten._scaled_dot_product_cudnn_attention.default, context=True)
def _cudnn(
    context: Context, q: Any, k: Any, v: Any, bias: Any, with_lse: bool, p: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    data = _seed(context, p)
    out, lse = _forward(context, q, k, v, bias, p, causal, scale, data)
    if lse is not None:
        lse = jnp.reshape(lse, tuple(context.value(1).shape))
    values = [context.value(index) for index in (4, 5)]
    return out, lse, None, None, *values, *_packed(data), None


@lowers(aten._scaled_dot_product_cudnn_attention_backward.default, context=True)
def _cudnn_backward(
    context: Context, gradient: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, seed: Any, offset: Any, bias: Any,
    cq: Any, ck: Any, mq: Any, mk: Any, p: float, causal: bool, *, scale: float | None = None,
) -> Any:  # fmt: skip
    lse = jnp.reshape(lse, q.shape[:3])
    data = _unpacked(seed, offset, p)
    return _backward(context, gradient, q, k, v, bias, out, lse, p, causal, scale, data)[:3]
