"""The least time that an operator can take: for its arithmetic, and for the bytes that it must move.

S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore architectures",
Communications of the ACM 52(4), 2009. Arithmetic is counted by the formulas that torch.utils.flop_counter registers.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from memopt.graph.targets import is_pointwise
from memopt.memory.cost.devices import Device
from memopt.program import argument, is_view, tensors_of
from memopt.torch_compat.fake_tensors import has_symbols
from memopt.torch_compat.operators import OpOverload
from memopt.torch_compat.storages import span_of, storage_id

_ATEN = torch.ops.aten
# Operators of one element at a time that PyTorch does not tag as such.
_ALSO_POINTWISE = frozenset(
    (
        _ATEN._to_copy.default,
        _ATEN.copy.default,
        _ATEN.fill.Scalar,
        _ATEN.fill.Tensor,
        _ATEN.hardsigmoid_backward.default,
        _ATEN.hardswish_backward.default,
        _ATEN.hardtanh_backward.default,
        _ATEN.native_dropout.default,
        _ATEN.native_dropout_backward.default,
        _ATEN.slice_copy.Tensor,
    )
)
# Operators that read of their first operand only what they return.
_PICKING = frozenset((_ATEN.embedding, _ATEN.gather, _ATEN.index, _ATEN._unsafe_index, _ATEN.index_select))
_SAME_FORMULA = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _ATEN._scaled_dot_product_flash_attention_backward,
}
_CONVOLUTIONS = (_ATEN.convolution, _ATEN.convolution_backward)


def makes_nothing(node: fx.Node) -> bool:
    """Whether the node only names, views or measures what is there already."""
    if node.target is operator.getitem or is_view(node) or not tensors_of(node):
        return True
    # Views that their schemas do not call so (_unsafe_view).
    there = {storage_id(tensor) for tensor in operands_of(node) if tensor.layout is torch.strided}
    return all(t.layout is torch.strided and storage_id(t) in there for t in tensors_of(node))


def is_light(node: fx.Node) -> bool:
    """Whether the node only moves bytes: a pointwise operator, a copy, a dropout, or one that reads no tensor.

    Their time depends on what they are fused with, so it is never measured.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return is_pointwise(target) or target in _ALSO_POINTWISE or not operands_of(node)


def seconds(node: fx.Node, device: Device) -> float:
    """The time of one call of the node on a device, from its arithmetic and its traffic; 0 for views."""
    if makes_nothing(node):
        return 0.0
    products, convolutions, _ = device.reached
    moving = moving_seconds(bytes_moved(node), device)
    operations = flops(node)
    arithmetic = convolutions if _is_convolution(node) else products
    return max(moving, operations / (rate(node, device) * arithmetic)) if operations else moving


def moving_seconds(moved: int, device: Device) -> float:
    """The time of one kernel that reads and writes so many bytes, its launch included."""
    if device.traffic:
        return _interpolated(device.traffic, moved)
    return device.launch_seconds + moved / (device.bytes_per_second * device.reached[2])


def _interpolated(points: tuple[tuple[int, float], ...], moved: int) -> float:
    """Time by straight lines between measured points; beyond the last in proportion."""
    first_bytes, first_seconds = points[0]
    if moved <= first_bytes:
        return first_seconds
    for (low, before), (high, after) in itertools.pairwise(points):
        if moved <= high:
            return before + (after - before) * (moved - low) / (high - low)
    return points[-1][1] * moved / points[-1][0]


def rate(node: fx.Node, device: Device) -> float:
    """Peak operations per second of the node's arithmetic on the device, at PyTorch's present precision settings."""
    # The narrowest operand's: row sums of attention, and sums of products, are in float32 whatever is multiplied.
    kinds = (tensor.dtype for tensor in operands_of(node) if tensor.dtype.is_floating_point)
    kind = min(kinds, key=lambda dtype: dtype.itemsize, default=torch.float32)
    if kind is torch.float32 and device.type == "cuda" and _reduced(node):
        return device.flops["tf32"]
    return device.flops.get(str(kind).removeprefix("torch."), device.flops["float32"])


def _reduced(node: fx.Node) -> bool:
    if _is_convolution(node):
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _is_convolution(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _CONVOLUTIONS


def flops(node: fx.Node) -> int:
    """Floating-point operations of one call, two for a multiplication with its addition; 0 without a formula for them.

    Causal attention is counted by half, the backward of a convolution as its forward once for each gradient wanted:
    torch's own formula for it forgets groups. That of attention refuses fewer heads of keys in torch 2.11, where each
    serves several of queries: it is asked for as many as there are of queries.
    """
    packet: Any = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(_SAME_FORMULA.get(packet, packet))
    if formula is None:
        return 0
    values: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda argument: argument.meta["val"])
    args, kwargs = values
    if "scaled_dot_product" in str(packet):
        args = _with_all_heads(args)
    if packet is _ATEN.convolution_backward:
        gradient, data, weight, _, *geometry, wanted = args
        return int(sum(wanted[:2])) * int(
            flop_registry[_ATEN.convolution](data, weight, None, *geometry, out_val=gradient)
        )
    try:
        count = int(formula(*args, **kwargs, out_val=node.meta["val"]))
    except AssertionError:  # shapes that the formula does not know
        return 0
    return count // 2 if _is_causal(node) else count


def _with_all_heads(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands of attention by their shapes, those of fewer heads than others as if they had as many."""
    shapes = [each.shape if isinstance(each, torch.Tensor) else each for each in args]
    most = max((each[1] for each in shapes if isinstance(each, torch.Size) and len(each) == 4), default=0)
    return tuple(
        torch.Size((each[0], most, *each[2:])) if isinstance(each, torch.Size) and len(each) == 4 else each
        for each in shapes
    )


def _is_causal(node: fx.Node) -> bool:
    return argument(node, "is_causal") is True


def bytes_moved(node: fx.Node) -> int:
    """Bytes that one call reads and writes, each element that it touches once."""
    results = {storage_id(tensor): touched_bytes(tensor) for tensor in tensors_of(node)}
    written = sum(results.values())
    read = [touched_bytes(tensor) for tensor in operands_of(node)]
    if read and getattr(node.target, "overloadpacket", None) in _PICKING:
        read[0] = min(read[0], written)
    return sum(read) + written


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a walk over the tensor reaches: an expanded dimension counts once, gaps between rows do not count."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    if has_symbols(tensor):
        return _touched(tensor.shape, tensor.stride()) * tensor.element_size()
    return _touched_of_numbers(tensor.shape, tensor.stride()) * tensor.element_size()


def _touched(shape: Sequence[int], strides: Sequence[int]) -> int:
    distinct = (size for size, stride in zip(shape, strides, strict=True) if stride)
    return min(span_of(shape, strides), math.prod(distinct))


_touched_of_numbers = functools.lru_cache(maxsize=4096)(_touched)  # a graph's values have few layouts


def result_bytes(node: fx.Node) -> int:
    """The bytes that writing all results of a node touches."""
    return sum(touched_bytes(tensor) for tensor in tensors_of(node))


def operands_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that the node reads, each node once."""
    return [tensor for argument in node.all_input_nodes for tensor in tensors_of(argument)]


def span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last that the layout reaches."""
    if tensor.layout is not torch.strided:
        return tensor.numel()
    return span_of(tensor.shape, tensor.stride())
