"""How the gradients of torch's losses lie: without gaps, whatever lies how; tried on torch 2.11 and 2.13.

On fake tensors torch writes these operators out, and lets the result lie as the input does: graphs that are traced with
that view what cannot be viewed so, where a loss is of a transposed tensor (torch.compile's backend "aot_eager", too).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import _decomp
from torch._subclasses import fake_impls

aten = torch.ops.aten
WITHOUT_GAPS = (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
)


def _on_meta(gradient: torch.Tensor, of: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(of, memory_format=torch.contiguous_format)


def _on_fakes(mode: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return _on_meta(*args)


def correct() -> None:
    """Have fake tensors say how the gradients of these losses lie, from now on in this process."""
    for operator in WITHOUT_GAPS:
        if operator not in _decomp.meta_table:  # else it is asked for what it writes out
            _decomp.meta_table[operator] = _on_meta
            fake_impls.register_op_impl(operator)(_on_fakes)
