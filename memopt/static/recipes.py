"""Operators without a true out= overload on CPU, computed into given memory by operators that have one.

Each function writes its results into `outs`, may use `scratch` (a flat tensor of the operand's dtype), and allocates
nothing. Numbers that an operator wants as tensors come as 0-dim tensors, since a Python number would be put into a
fresh one. Among forms that compute the same the fastest on one core was taken: a batch norm as one multiplication and
one addition (`addcmul` takes 3.5 times as long where two operands are broadcast), a deviation as a vector norm (`var`
takes 20 times as long).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memopt.torch_compat.operators import OpOverload, schema_of

aten = torch.ops.aten


# -- normalisation --------------------------------------------------------------------------------------------------


def mean(result: Tensor, x: Tensor, dims: Sequence[int], keepdim: bool, count: Tensor) -> None:
    """The mean over `dims`, of `count` elements each, as ATen computes it: a sum, divided."""
    aten.sum.IntList_out(x, dims, keepdim, out=result)
    aten.div.out(result, count, out=result)


def normalise(
    result: Tensor, mid: Tensor, scale: Tensor, x: Tensor, dims: Sequence[int], count: Tensor, eps: Tensor
) -> None:
    """Write (x - mean) / √(variance + eps), the mean and 1 / √(…); the latter two keep `dims` with size 1."""
    mean(mid, x, dims, True, count)
    aten.sub.out(x, mid, out=result)
    aten.linalg_vector_norm.out(result, 2, dims, True, out=scale)
    aten.mul.out(scale, scale, out=scale)
    aten.div.out(scale, count, out=scale)
    aten.add.out(scale, eps, out=scale)
    aten.rsqrt.out(scale, out=scale)
    aten.mul.out(result, scale, out=result)


def affine(result: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """Multiply by the weight and add the bias, where there are any."""
    if weight is not None:
        aten.mul.out(result, weight, out=result)
    if bias is not None:
        aten.add.out(result, bias, out=result)


def layer_norm(
    outs: Sequence[Tensor], x: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None, count: Tensor, eps: Tensor
) -> None:
    """Normalise the last `dims` dimensions. Writes (result, mean, 1 / deviation)."""
    result, mid, scale = outs
    normalise(result, mid, scale, x, list(range(x.dim() - dims, x.dim())), count, eps)
    affine(result, weight, bias)


def group_norm(
    outs: Sequence[Tensor],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    count: Tensor,
    eps: Tensor,
) -> None:
    """Normalise each group of channels of x (n, c, …). Writes (result, mean, 1 / deviation), the latter (n, groups)."""
    result, mid, scale = outs
    shape = (x.shape[0], groups, math.prod(x.shape[1:]) // groups)
    normalise(result.view(shape), mid.unsqueeze(2), scale.unsqueeze(2), x.view(shape), [2], count, eps)
    spread = (-1, *[1] * (x.dim() - 2))
    affine(result, None if weight is None else weight.view(spread), None if bias is None else bias.view(spread))


def batch_norm(
    result: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mid: Tensor, var: Tensor, eps: Tensor,
    scratch: Tensor,
) -> None:  # fmt: skip
    """Normalise by running statistics: x · a + b with a = weight / √(var + eps) and b = bias - mid · a."""
    channels = mid.shape[0]
    a, b = scratch[:channels], scratch[channels : 2 * channels]
    aten.add.out(var, eps, out=a)
    aten.rsqrt.out(a, out=a)
    if weight is not None:
        aten.mul.out(a, weight, out=a)
    aten.mul.out(mid, a, out=b)
    if bias is not None:
        aten.sub.out(bias, b, out=b)
    else:
        aten.neg.out(b, out=b)
    spread = (channels, *[1] * (x.dim() - 2))
    aten.mul.out(x, a.view(spread), out=result)
    aten.add.out(result, b.view(spread), out=result)


# -- convolutions ---------------------------------------------------------------------------------------------------


def convolution(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, scratch: Tensor | None,
) -> None:  # fmt: skip
    """Convolve x (n, c, h, w) with weight (o, c / groups, kh, kw) into out (n, o, h', w') of any strides.

    One matrix product per tile of output rows, on columns that are gathered into `scratch`; a 1x1 convolution of
    stride 1 reads its columns from x. Depthwise: one multiply-add per tap.
    """
    if weight.shape[1] == 1 and groups == x.shape[1] > 1:
        _depthwise(out, x, weight, bias, stride, padding, dilation)
        return
    _, depth, *kernel = weight.shape
    last = weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    matrices = (weight.permute(0, 2, 3, 1) if last else weight).reshape(groups, weight.shape[0] // groups, -1)
    height, width = out.shape[2:]
    rows, slab = height, out
    if scratch is not None:
        rows, room = tile_rows(scratch.numel(), weight.shape, x.shape, stride, padding, dilation, height, width)
        slab, scratch = scratch[:room], scratch[room:]
    for n in range(x.shape[0]):
        for group in range(groups):
            source = x[n, group * depth : (group + 1) * depth]
            outs = slice(group * matrices.shape[1], (group + 1) * matrices.shape[1])
            offset = None if bias is None else bias[outs]
            for top in range(0, height, rows):
                count = min(rows, height - top)
                if scratch is None:
                    columns = source.flatten(1)
                else:
                    flat = scratch[: matrices.shape[2] * count * width]
                    _gather(flat, slab, source, last, kernel, stride, padding, dilation, top, count, width)
                    columns = flat.view(matrices.shape[2], count * width)
                _product(out[n, outs, top : top + count], matrices[group], columns, offset)


def tile_rows(
    elements: int, weight: Sequence[int], x: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], height: int, width: int,
) -> tuple[int, int]:  # fmt: skip
    """How many of `height` output rows make a tile of at most `elements`, at least one; what of it is the slab."""
    columns = math.prod(weight[1:]) * width
    if not any(padding):
        return max(1, min(height, elements // columns)), 0
    wide = weight[1] * ((width - 1) * stride[1] + (weight[3] - 1) * dilation[1] + 1)
    fixed = wide * ((weight[2] - 1) * dilation[0] + 1 - stride[0])
    rows = max(1, min(height, (elements - fixed) // (columns + wide * stride[0])))
    return rows, fixed + rows * wide * stride[0]


def convolution_then(activation: OpOverload | None, out: Tensor, *args: Any) -> None:
    """Convolve into out, and run an in-place activation over it."""
    convolution(out, *args)
    if activation is not None:
        activation(out)


def convolution_1d(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, scratch: Tensor,
) -> None:  # fmt: skip
    """Convolve x (n, c, w) with weight (o, c / groups, kw), as an image of one row."""
    image = out.unsqueeze(2), x.unsqueeze(2), weight.unsqueeze(2)
    convolution(*image, bias, stride, padding, dilation, groups, scratch)


def _product(out: Tensor, matrix: Tensor, columns: Tensor, bias: Tensor | None) -> None:
    """Write matrix (o, k) @ columns (k, rows · w) + bias (o) into out (o, rows, w)."""
    if out.stride(0) == 1 and out.stride(2) > 1:  # channels last
        flat, left, right = out.permute(1, 2, 0).view(-1, out.shape[0]), columns.t(), matrix.t()
    else:
        flat, left, right = out.view(out.shape[0], -1), matrix, columns
        bias = None if bias is None else bias.unsqueeze(1)
    if bias is None:
        aten.mm.out(left, right, out=flat)
    else:
        aten.addmm.out(bias, left, right, out=flat)


def _gather(
    flat: Tensor, slab: Tensor, x: Tensor, last: bool, kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], top: int, count: int, width: int,
) -> None:  # fmt: skip
    """The columns of output rows top..top+count of x (c, h, w), ordered (c, kh, kw), or (kh, kw, c) if `last`.

    Where there is padding, the rows that are read are first put into `slab`, with zeros around them.
    """
    channels, size, across = x.shape
    first = top * stride[0] - padding[0]
    if any(padding):
        rows = (count - 1) * stride[0] + (kernel[0] - 1) * dilation[0] + 1
        wide = (width - 1) * stride[1] + (kernel[1] - 1) * dilation[1] + 1
        slab = slab[: channels * rows * wide].view(channels, rows, wide)
        low, high = max(0, first), min(size, first + rows)
        right = min(across, wide - padding[1])
        if high - low < rows or right + padding[1] < wide or padding[1]:
            aten.zero_(slab)
        if low < high and right > 0:
            inside = slab[:, low - first : high - first, padding[1] : padding[1] + right]
            aten.copy_(inside, x[:, low:high, :right])
        x, first = slab, 0
    c, h, w = x.stride()
    shape = (*kernel, channels, count, width)
    strides = (dilation[0] * h, dilation[1] * w, c, stride[0] * h, stride[1] * w)
    columns = flat.view(shape) if last else flat.view(channels, *kernel, count, width).permute(1, 2, 0, 3, 4)
    aten.copy_(columns, x.as_strided(shape, strides, x.storage_offset() + first * h))


class _Window:
    """Which of `count` positions, `stride` apart from `first` on, lie in 0..size, and the slice of what they read."""

    def __init__(self, first: int, stride: int, count: int, size: int) -> None:
        self.start = min(count, max(0, -(first // stride)))
        self.stop = max(self.start, min(count, (size - 1 - first) // stride + 1))
        low = first + self.start * stride
        self.source = slice(low, low + (self.stop - self.start - 1) * stride + 1, stride)


def _depthwise(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> None:  # fmt: skip
    channels = x.shape[1]
    times = out.shape[1] // channels
    out, x = aten.unflatten.int(out, 1, [channels, times]), x.unsqueeze(2)
    taps = weight.view(channels, times, *weight.shape[2:], 1, 1)
    if bias is None:
        aten.zero_(out)
    else:
        aten.copy_(out, bias.view(channels, times, 1, 1))
    for i in range(weight.shape[2]):
        inside = _Window(i * dilation[0] - padding[0], stride[0], out.shape[3], x.shape[3])
        for j in range(weight.shape[3]):
            across = _Window(j * dilation[1] - padding[1], stride[1], out.shape[4], x.shape[4])
            if inside.stop > inside.start and across.stop > across.start:
                target = out[..., inside.start : inside.stop, across.start : across.stop]
                aten.addcmul.out(target, x[..., inside.source, across.source], taps[:, :, i, j], out=target)


def transposed_convolution(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, scratch: Tensor,
) -> None:  # fmt: skip
    """Convolve x (n, c, h, w) with weight (c, o / groups, kh, kw), transposed: each tap adds a product to a window."""
    if bias is None:
        aten.zero_(out)
    else:
        aten.copy_(out, bias.view(-1, 1, 1))
    depth, outs = weight.shape[0] // groups, weight.shape[1]
    tap, scratch = scratch[: depth * outs].view(outs, depth), scratch[depth * outs :]
    rows = max(1, min(x.shape[2], scratch.numel() // (outs * x.shape[3])))
    for group in range(groups):
        for i in range(weight.shape[2]):
            for j in range(weight.shape[3]):
                aten.copy_(tap, weight[group * depth : (group + 1) * depth, :, i, j].t())
                across = _Window(j * dilation[1] - padding[1], stride[1], x.shape[3], out.shape[3])
                for n in range(x.shape[0]):
                    source = x[n, group * depth : (group + 1) * depth]
                    for top in range(0, x.shape[2], rows):
                        count = min(rows, x.shape[2] - top)
                        first = i * dilation[0] - padding[0] + top * stride[0]
                        inside = _Window(first, stride[0], count, out.shape[2])
                        if inside.stop <= inside.start or across.stop <= across.start:
                            continue
                        made = scratch[: outs * count * x.shape[3]].view(outs, -1)
                        aten.mm.out(tap, source[:, top : top + count].flatten(1), out=made)
                        made = made.view(outs, count, -1)[:, inside.start : inside.stop, across.start : across.stop]
                        target = out[n, group * outs : (group + 1) * outs, inside.source, across.source]
                        aten.add.out(target, made, out=target)


def pool(outs: Sequence[Tensor], overload: OpOverload, x: Tensor, *args: object) -> None:
    """Pool x (n, c, h, w): at once, or image by image where x or a result is a slice of a larger tensor."""
    names = [argument.name for argument in schema_of(overload).arguments if argument.is_out]
    if all(t.is_contiguous() or t.is_contiguous(memory_format=torch.channels_last) for t in (x, *outs)):
        overload(x, *args, **dict(zip(names, outs, strict=True)))
        return
    for n in range(x.shape[0]):
        overload(x[n], *args, **{name: out[n] for name, out in zip(names, outs, strict=True)})


# -- attention ------------------------------------------------------------------------------------------------------


def attention(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, future: Tensor | None, scale: float,
    scratch: Tensor,
) -> None:  # fmt: skip
    """softmax(q kᵀ · scale + mask) v for (batch, heads, length, width), some rows of scores at a time.

    Args:
        out: (batch, heads, length, width), of any strides.
        q, k, v: the operands.
        mask: added to the scores; it broadcasts to (batch, heads, length, keys).
        future: for causal attention, (rows, rows) true above the diagonal, where rows is the number in one tile.
        scale: of the scores.
        scratch: the scores of one tile.
    """
    batch, heads, length, _ = q.shape
    keys = k.shape[2]
    rows = min(length, scratch.numel() // (heads * keys))
    mask = None if mask is None else mask.expand(batch, heads, length, keys)
    for b in range(batch):
        for top in range(0, length, rows):
            count = min(rows, length - top)
            seen = keys if future is None else min(keys, top + count)
            scores = scratch[: heads * count * seen].view(heads, count, seen)
            turned = k[b, :, :seen].transpose(1, 2)
            aten.baddbmm.out(scores, q[b, :, top : top + count], turned, beta=0, alpha=scale, out=scores)
            if mask is not None:
                aten.add.out(scores, mask[b, :, top : top + count, :seen], out=scores)
            if future is not None and seen > top:
                aten.masked_fill_.Scalar(scores[:, :, top:], future[:count, : seen - top], -math.inf)
            aten._softmax.out(scores, -1, False, out=scores)
            aten.bmm.out(scores, v[b, :, :seen], out=out[b, :, top : top + count])


def safe_softmax(out: Tensor, x: Tensor, dim: int, infinity: Tensor, scratch: Tensor) -> None:
    """Softmax with zeros where all of `dim` is -∞; `scratch` holds a number and a flag for each row."""
    shape = [1 if d == dim else size for d, size in enumerate(x.shape)]
    rows = math.prod(shape)
    lowest, masked = scratch[:rows].view(shape), scratch[rows:].view(torch.bool)[:rows].view(shape)
    aten.amax.out(x, [dim], True, out=lowest)
    aten.eq.Tensor_out(lowest, infinity, out=masked)
    aten._softmax.out(x, dim, False, out=out)
    aten.masked_fill_.Scalar(out, masked, 0)


# -- copies ---------------------------------------------------------------------------------------------------------


def embedding(out: Tensor, weight: Tensor, index: Tensor) -> None:
    """Rows of the weight (entries, width) into out (*index, width)."""
    aten.index_select.out(weight, 0, index.view(-1), out=out.view(-1, weight.shape[1]))


def pad(out: Tensor, x: Tensor, amounts: Sequence[int], value: float) -> None:
    """Put x in the middle of `value`s; the amounts go before and after each dimension, the last dimension first."""
    aten.fill_.Scalar(out, value)
    for position, dim in enumerate(range(x.dim() - 1, x.dim() - 1 - len(amounts) // 2, -1)):
        out = out.narrow(dim, amounts[2 * position], x.shape[dim])
    aten.copy_(out, x)


def repeat(out: Tensor, x: Tensor, times: Sequence[int]) -> None:
    """Write x over and over: `times[i]` along dimension i of out, which is contiguous."""
    x = x[(None,) * (len(times) - x.dim())]
    split = [size for pair in zip(times, x.shape, strict=True) for size in pair]
    for dim in reversed(range(x.dim())):
        x = x.unsqueeze(dim)
    aten.copy_(out.view(split), x)


def scatter(out: Tensor, x: Tensor, source: Tensor, view: OpOverload, *where: int) -> None:
    """Copy x, and the source into a view of the copy."""
    aten.copy_(out, x)
    aten.copy_(view(out, *where), source)


def strided_scatter(
    out: Tensor, x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], place: int
) -> None:
    """Copy x, and the source into a strided view of the copy, which begins `place` elements after its first."""
    aten.copy_(out, x)
    aten.copy_(out.as_strided(size, stride, out.storage_offset() + place), source)


def copy_then(out: Tensor, x: Tensor, overload: OpOverload, *args: object) -> None:
    """Copy x, then apply an in-place operator to the copy."""
    aten.copy_(out, x)
    overload(out, *args)
