"""Attention captured as CUDA runs it, on a machine without CUDA.

`scaled_dot_product_attention` chooses its kernels by device: on a CPU, attention with dropout keeps matrices of all
scores, where CUDA's fused kernels keep a number for each row. A plan for CUDA must see the latter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from memopt.torch_compat.patched import replaced

_ATEN = torch.ops.aten
_PLAIN: Callable[..., Tensor] = F.scaled_dot_product_attention
_LARGEST_HEAD = 256  # the widest head of the flash kernel


@contextlib.contextmanager
def attention_as_on(device_type: str | None) -> Iterator[None]:
    """Trace attention, while this is entered, as a device of this type runs it. None: as the tensors' own device does.

    Of CUDA's kernels, the flash one for half precision without a mask, the memory-efficient one for other attention of
    (batch, heads, tokens, width); the unfused one for the rest. What was traced so can be counted, not run.
    """
    if device_type != "cuda":
        yield
        return
    # The mode sees calls in graphs, not those inside functions that it sees (F.multi_head_attention_forward).
    with _Fused(), replaced(F, "scaled_dot_product_attention", _attention):
        yield


class _Fused(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (_attention if func is _PLAIN else func)(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = (tensor.repeat_interleave(groups, -3) for tensor in (key, value))
    if not all(tensor.dim() == 4 and tensor.shape[:2] == query.shape[:2] for tensor in (query, key, value)):
        return _PLAIN(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    width = query.size(-1)
    half = query.dtype in (torch.float16, torch.bfloat16)
    result: Tensor
    if attn_mask is None and half and width <= _LARGEST_HEAD and value.size(-1) == width:
        result = _ATEN._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return result
    bias = attn_mask
    if bias is not None:
        if bias.dtype is torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(bias.logical_not(), -math.inf)
        bias = bias.expand(*query.shape[:3], key.size(2))
    gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    result = _ATEN._scaled_dot_product_efficient_attention(
        query, key, value, bias, gradients, dropout_p, is_causal, scale=scale
    )[0]
    return result
