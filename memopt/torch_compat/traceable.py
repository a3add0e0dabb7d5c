"""What stands for functions of torch while a model is traced: the same in one graph, laid out as eager lays it out.

Some look at values, which would break the graph; batch norms on a CPU lie otherwise than their fake results say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import batchnorm, transformer


def _hint_alone(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """For `_detect_is_causal_mask`: what is not said to be causal is not; the mask is applied as it is given."""
    return is_causal is True


def _encode(
    self: nn.TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> torch.Tensor:
    """For `TransformerEncoder.forward`: where eager leaves padding out, as nested tensors, it has zeros in the end.

    Eager does so if each padded sequence begins with what is no padding; here that is one value of the graph.
    """
    padding = functional._canonical_mask(
        mask=src_key_padding_mask,
        mask_name="src_key_padding_mask",
        other_type=functional._none_or_dtype(mask),
        other_name="mask",
        target_type=src.dtype,
    )
    mask = functional._canonical_mask(
        mask=mask, mask_name="mask", other_type=None, other_name="", target_type=src.dtype, check_other=False
    )
    output = src
    for layer in self.layers:
        output = layer(output, src_mask=mask, is_causal=is_causal is True, src_key_padding_mask=padding)
    if padding is not None and mask is None and _leaves_padding_out(self, src):
        left_out = padding < 0
        kept = left_out.logical_not()
        aligned = torch.logical_or(kept[:, :-1], left_out[:, 1:]).all()
        output = output.masked_fill((left_out & aligned).unsqueeze(-1), 0.0)
    return output if self.norm is None else self.norm(output)


def _leaves_padding_out(self: nn.TransformerEncoder, src: torch.Tensor) -> bool:
    first = self.layers[0]
    nests = torch.backends.mha.get_fastpath_enabled() and getattr(self, "use_nested_tensor", False)
    if not nests or first.training or src.dim() != 3 or torch.is_autocast_enabled():
        return False
    attention = first.self_attn
    given = [src, attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, attention.out_proj.bias]
    for module in (first.norm1, first.norm2, first.linear1, first.linear2):
        given += [module.weight, module.bias]
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given))


def _check_in_graph(cond: torch.Tensor, message: Callable[[], str] | None = None) -> None:
    """For `torch._check_tensor_all`: an assertion of the graph."""
    torch._assert_async(cond.all(), "Expected cond to be True, but got False")


def _normalize(self: Any, input: torch.Tensor) -> torch.Tensor:
    """For the forward of batch norms: a cumulative average (`momentum=None`) divides by a count that stays a tensor."""
    count, mean, var = self.num_batches_tracked, self.running_mean, self.running_var
    plain = self.momentum is not None or not (self.training and self.track_running_stats)
    if plain or count is None or mean is None or var is None:
        return batchnorm._BatchNorm.forward(self, input)
    self._check_input_dim(input)
    count.add_(1)
    # With a momentum of 1 these become the batch's own, in one pass over it, and as the kernel rounds them.
    own_mean, own_var = torch.zeros_like(mean), torch.ones_like(var)
    output = functional.batch_norm(input, own_mean, own_var, self.weight, self.bias, True, 1.0, self.eps)
    with torch.no_grad():
        for running, own in ((mean, own_mean), (var, own_var)):
            wide = torch.promote_types(running.dtype, torch.float32)
            share = count.to(wide).reciprocal()
            running.copy_(own.to(wide) * share + running.to(wide) * (1 - share))
    return output


def _batch_norm(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """For `F.batch_norm`: on a CPU its result is contiguous or channels last, whatever its input is."""
    return _as_on_cpu(input, functional.batch_norm(input, *args, **kwargs))


def _plain_batch_norm(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """For `torch.batch_norm`, likewise."""
    return _as_on_cpu(input, torch.batch_norm(input, *args, **kwargs))


def _log_sigmoid(input: torch.Tensor) -> torch.Tensor:
    """For `F.logsigmoid`, whose result on a CPU is contiguous."""
    output = functional.logsigmoid(input)
    return output.contiguous() if input.device.type == "cpu" else output


def _rrelu(
    input: torch.Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> torch.Tensor:
    """For `F.rrelu` and `torch.rrelu`: on a CPU its result is contiguous, and it draws in that order."""
    if inplace:
        return _rrelu_in_place(input, lower, upper, training)
    given = input.contiguous() if input.device.type == "cpu" else input
    return functional.rrelu(given, lower, upper, training)


def _rrelu_in_place(
    input: torch.Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False
) -> torch.Tensor:
    """For `F.rrelu_`, likewise."""
    if not training or input.device.type != "cpu" or input.is_contiguous():
        return functional.rrelu(input, lower, upper, training, True)
    return input.copy_(functional.rrelu(input.contiguous(), lower, upper, training))


def _as_on_cpu(input: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    if input.device.type != "cpu" or input.is_contiguous():
        return output
    if input.dim() == 4 and _is_channels_last(input, (1, 3, 2, 0)):
        return output.contiguous(memory_format=torch.channels_last)
    if input.dim() == 5 and _is_channels_last(input, (1, 4, 3, 2, 0)):
        return output.contiguous(memory_format=torch.channels_last_3d)
    return output.contiguous()


def _is_channels_last(input: torch.Tensor, order: tuple[int, ...]) -> bool:
    """Whether torch takes a tensor's strides for channels last: as `suggest_memory_format` does."""
    least = 0
    if input.stride(1) == 0:
        return False
    for dim in order:
        if input.size(dim) == 0 or input.stride(dim) < least or (dim == 0 and least == input.stride(1)):
            return False
        least = input.stride(dim) * max(input.size(dim), 1)
    return True


REPLACEMENTS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    transformer._detect_is_causal_mask: _hint_alone,
    nn.TransformerEncoder.forward: _encode,
    functional.batch_norm: _batch_norm,
    torch.batch_norm: _plain_batch_norm,
    functional.logsigmoid: _log_sigmoid,
    functional.rrelu: _rrelu,
    torch.rrelu: _rrelu,
    torch.rrelu_: _rrelu_in_place,
    torch._check_tensor_all: _check_in_graph,
    batchnorm._BatchNorm.forward: _normalize,
}
