"""What an operator takes beside its results, estimated where it cannot be run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from memopt.graph.fake_calls import CHANNELS_LAST
from memopt.memory.cost.roofline import is_light, makes_nothing, operands_of, span
from memopt.memory.rounding import allocated_bytes
from memopt.program import argument, tensors_of
from memopt.torch_compat.recurrent_layers import RECURRENT_BACKWARD
from memopt.torch_compat.storages import storage_id

_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
_OF_ONEDNN = (torch.float32, torch.bfloat16, torch.float16)  # of other types ATen computes convolutions itself
_CHANNELS = 8
_KEPT = {"LSTM": 24, "GRU": 12, "RNN_TANH": 4, "RNN_RELU": 4}
_KEPT_BY_CUDNN = {"LSTM": 14, "GRU": 14, "RNN_TANH": 12, "RNN_RELU": 12}
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
_WITHOUT_WORKSPACE = {
    torch.ops.aten._log_softmax.default,
    torch.ops.aten._log_softmax_backward_data.default,
    torch.ops.aten._softmax.default,
    torch.ops.aten._softmax_backward_data.default,
    torch.ops.aten.nll_loss_forward.default,
    torch.ops.aten.nll_loss_backward.default,
    torch.ops.aten.embedding.default,
    torch.ops.aten.sum.default,
    torch.ops.aten.sum.dim_IntList,
    torch.ops.aten.mean.default,
    torch.ops.aten.mean.dim,
    torch.ops.aten.amax.default,
    torch.ops.aten.gather.default,
    torch.ops.aten.cat.default,
}
_SORTS = (torch.ops.aten.sort.default, torch.ops.aten.sort.stable)


def output_bytes(node: fx.Node) -> int:
    """Bytes that the allocator takes for the node's results; 0 for views."""
    if makes_nothing(node):
        return 0
    sizes = {storage_id(t): allocated_bytes(t.untyped_storage().nbytes(), t.device) for t in tensors_of(node)}
    return sum(sizes.values())


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that the node's operator may need while it runs, above operands and results.

    Of the operators that are known to need much: convolutions reorder their operands, sorting keeps a second copy of
    its results, the backward of attention accumulates the query's gradient apart. Others count as needing none.

    cuDNN computes with channels last: other operands and the result are copied, channels padded to eight. Measured on
    an H200 in bfloat16, distinct convolutions of a ResNet-50 and a U-Net: 25 of 28 within 2 % of it, the others up to
    9 MB off. Those of one pixel at every pixel are matrix products, of which the large ones took nothing. Where all
    lies channels last already nothing is copied; the weight's gradient is summed in float32.
    """
    if node.target is torch.ops.aten.convolution.default and tensors_of(node)[0].is_cuda:
        return _cudnn_bytes(node)
    if node.target is _CONVOLUTIONS[1] and tensors_of(node)[0].is_cuda and all(map(_lies_last, operands_of(node)[:2])):
        weight = operands_of(node)[-1]
        return allocated_bytes(weight.numel() * torch.float32.itemsize, weight.device)
    if node.target in _CONVOLUTIONS:
        operands = sum(allocated_bytes(span(t) * t.element_size(), t.device) for t in operands_of(node))
        result = tensors_of(node)[0]
        return operands if result.is_cuda or result.dtype in _OF_ONEDNN else _unfolded_bytes(node, operands)
    if node.target in _SORTS:
        return output_bytes(node)
    if node.target is RECURRENT_BACKWARD:
        return _recurrent_bytes(node)
    if "attention" in str(node.target) and "backward" in str(node.target):
        query = tensors_of(node)[0]
        return allocated_bytes(span(query) * query.element_size(), query.device)
    return 0


def most_workspace_bytes(node: fx.Node) -> int:
    """Bytes that the operator takes beside operands and results at most, where it is run to be measured.

    On a CPU convolutions (oneDNN) may reorder their results as well, which most do not: a plan counts what is measured.
    """
    result = tensors_of(node)[0] if node.target in _CONVOLUTIONS else None
    reordered = result is not None and not result.is_cuda and result.dtype in _OF_ONEDNN
    return workspace_bytes(node) + reordered * output_bytes(node)


def needs_none(node: fx.Node) -> bool:
    """Whether the node's operator is known to need no workspace on a CPU, so that it need not be run for that."""
    if node.target in _PRODUCTS:  # of other types oneDNN may reorder the operands
        return all(operand.dtype in (torch.float32, torch.float64) for operand in operands_of(node))
    return is_light(node) or node.target in _WITHOUT_WORKSPACE


def _recurrent_bytes(node: fx.Node) -> int:
    """About what backward through a recurrent layer computes anew and saves, and the weights as a library wants them.

    Values as large as the output, by kind: 0.9 to 2.5 of what 16 to 256 steps of 8 to 32 sequences took on a CPU, and
    0.55 to 2.9 of what 32 to 1000 steps of 8 to 256 took on an H200.
    """
    values: Any = fx.map_arg(node.args[3:6], lambda operand: operand.meta["val"])
    input, states, weights = values
    (length, batch, _), wide = input.shape, states[-1]
    kept = (_KEPT_BY_CUDNN if wide.is_cuda else _KEPT)[str(argument(node, "kind"))]
    elements = length * batch * wide.shape[0] * wide.shape[-1] * kept
    elements = elements // argument(node, "pieces") + 2 * sum(weight.numel() for weight in weights)
    return allocated_bytes(int(elements) * wide.element_size(), wide.device)


def _unfolded_bytes(node: fx.Node, operands: int) -> int:
    """What ATen's own convolution takes on a CPU: all that its kernel sees at each place, and groups apart.

    Of one sample at a time where the kernel is dilated, and in backward of a transposed one.
    """
    forward = node.target is _CONVOLUTIONS[0]
    values: Any = fx.map_arg(node.args[:3], lambda operand: operand.meta["val"])
    image, weight = values[:2] if forward else values[1:]
    transposed, groups = argument(node, "transposed"), argument(node, "groups")
    places = image if transposed else tensors_of(node)[0] if forward else values[0]
    alone = (transposed and not forward) or any(step > 1 for step in argument(node, "dilation"))
    seen = weight[0].numel() * math.prod(places.shape[2:]) * (1 if alone else image.shape[0])
    if weight.dim() == 5 and not transposed and not alone:  # those of volumes see all groups at once
        seen *= groups
    apart = operands + output_bytes(node) if groups > 1 else 0
    return allocated_bytes(seen * image.element_size(), image.device) + apart


def _lies_last(image: torch.Tensor) -> bool:
    form = CHANNELS_LAST.get(image.ndim)
    return form is not None and image.is_contiguous(memory_format=form)


def _cudnn_bytes(node: fx.Node) -> int:
    image, weight = operands_of(node)[:2]
    (result,) = tensors_of(node)
    single = all(size == 1 for size in weight.shape[2:]) and all(step == 1 for step in node.args[3])  # type: ignore
    if single or _lies_last(image):
        return 0
    padded = (
        -(-tensor.shape[1] // _CHANNELS) * _CHANNELS * (tensor.numel() // tensor.shape[1]) for tensor in (image, result)
    )
    return allocated_bytes((sum(padded) + weight.numel()) * image.element_size(), image.device)
