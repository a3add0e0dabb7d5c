"""How operators without a true out= overload on CPU are written into given memory, operator by operator."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memopt.passes.plan_buffers import Form
from memopt.program import tensors_of
from memopt.static import recipes as recipes
from memopt.static.write import Out, Place, Unfit, Write, is_true_out, number, out_overload
from memopt.torch_compat.operators import OpOverload, schema_of

aten = torch.ops.aten

LEAST_TILE, TILE = 128 * 1024, 512 * 1024
"""Bytes of one tile of a convolution's columns or of attention's scores: at least, and as wished to stay in a cache."""


def lower(node: fx.Node) -> Write | None:
    """The node's recipe; None when there is none for its operator, its device or its operands."""
    recipe = _RECIPES.get(node.target)
    if recipe is None or (_result(node).device.type != "cpu" and recipe not in _ANYWHERE):
        return None
    try:
        return recipe(node, *_arguments(node))
    except Unfit:
        return None


def has_recipe(target: object) -> bool:
    """Whether there is a recipe for the operator, for some operands."""
    return target in _RECIPES


def _arguments(node: fx.Node) -> list[Any]:
    """The arguments in the schema's order, defaults filled in."""
    found = []
    for position, argument in enumerate(schema_of(node.target).arguments):
        if position < len(node.args):
            found.append(node.args[position])
        else:
            found.append(node.kwargs.get(argument.name, argument.default_value))
    return found


def _value(node: Any) -> torch.Tensor:
    if not isinstance(node, fx.Node) or not isinstance(node.meta["val"], torch.Tensor):
        raise Unfit
    return node.meta["val"]


def _result(node: fx.Node) -> torch.Tensor:
    return tensors_of(node)[0]


def _same_dtype(node: fx.Node, *others: Any) -> None:
    """Mixed dtypes are cast into fresh memory."""
    for other in others:
        if other is not None and _value(other).dtype != _result(node).dtype:
            raise Unfit


def _tiles(node: fx.Node, row: int, rows: int, fixed: int = 0, *, slices: bool = True) -> Form:
    """Scratch for as many of `rows` rows of `row` elements as a tile holds, at least one, and `fixed` elements."""
    size = _result(node).element_size()
    least, wish = ((fixed + row * max(1, min(rows, tile // max(1, row * size)))) * size for tile in (LEAST_TILE, TILE))
    return Form(scratch=least, wish=wish, slices=slices)


def _copy(node: fx.Node, x: Any, *rest: Any) -> Write:
    if _value(x).device != _result(node).device:
        raise Unfit
    return Write(aten.copy_.default, (Out(), x))


def _relu(node: fx.Node, x: Any) -> Write:
    return Write(aten.clamp_min.out, (x, 0), {"out": Out()})


def _fill(value: float) -> Callable[..., Write]:
    return lambda node, *rest: Write(aten.fill_.Scalar, (Out(), value))


def _full(node: fx.Node, like: Any, value: Any, *rest: Any) -> Write:
    if isinstance(value, fx.Node):
        raise Unfit
    return Write(aten.fill_.Scalar, (Out(), value))


def _fill_like(node: fx.Node, x: Any, value: Any) -> Write:
    return _full(node, x, value)


def _scalar_tensor(node: fx.Node, value: Any, *rest: Any) -> Write:
    return _full(node, None, value)


def _arange(node: fx.Node, start: Any, end: Any, step: Any = 1, *rest: Any) -> Write:
    return Write(aten.arange.start_out, (start, end, step), {"out": Out()}, Form(slices=False))


def _rsub(node: fx.Node, x: Any, other: Any, alpha: Any) -> Write:
    left = other if isinstance(other, fx.Node) else number(other, node)
    if isinstance(other, fx.Node):
        _same_dtype(node, x, other)
    return Write(aten.sub.out, (left, x), {"alpha": alpha, "out": Out()})


def _mean(node: fx.Node, x: Any, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Write:
    _same_dtype(node, x)
    value = _value(x)
    dims = [d % value.dim() for d in dims] if dims else list(range(value.dim()))
    count = math.prod(value.shape[d] for d in dims)
    return Write(recipes.mean, (Out(), x, dims, keepdim, number(float(count), node)))


def _mean_all(node: fx.Node, x: Any, dtype: Any = None) -> Write:
    return _mean(node, x)


def _sum_all(node: fx.Node, x: Any, dtype: Any = None) -> Write:
    _same_dtype(node, x)
    return Write(aten.sum.IntList_out, (x, None, False), {"out": Out()}, Form(slices=False))


def _layer_norm(node: fx.Node, x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Write:
    _same_dtype(node, x, weight, bias)
    if any(t.dtype != _result(node).dtype for t in tensors_of(node)) or not _value(x).numel():
        raise Unfit
    numbers = number(float(math.prod(shape)), node), number(eps, node)
    return Write(recipes.layer_norm, (Place.OUTS, x, len(shape), weight, bias, *numbers), {}, Form(slices=False))


def _group_norm(
    node: fx.Node, x: Any, weight: Any, bias: Any, n: int, c: int, rest: int, groups: int, eps: float
) -> Write:
    _same_dtype(node, x, weight, bias)
    if not _value(x).is_contiguous() or not _value(x).numel():
        raise Unfit
    numbers = number(float(c // groups * rest), node), number(eps, node)
    return Write(recipes.group_norm, (Place.OUTS, x, weight, bias, groups, *numbers), {}, Form(slices=False))


def _batch_norm(
    node: fx.Node, x: Any, weight: Any, bias: Any, mid: Any, var: Any, momentum: float, eps: float
) -> Write:
    _same_dtype(node, x, weight, bias, mid, var)
    channels = _value(mid).shape[0]
    form = Form(scratch=2 * channels * _result(node).element_size())
    return Write(recipes.batch_norm, (Out(), x, weight, bias, mid, var, number(eps, node), Place.SCRATCH), {}, form)


def _convolution(
    node: fx.Node, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Write:  # fmt: skip
    _same_dtype(node, x, weight, bias)
    source, kernel, result = _value(x), _value(weight), _result(node)
    if source.dim() == 3 and not transposed:
        return _convolution_1d(node, x, weight, bias, stride, padding, dilation, groups)
    if source.dim() != 4 or not result.numel() or not source.numel() or not result.dtype.is_floating_point:
        raise Unfit
    dense = kernel.is_contiguous() or kernel.is_contiguous(memory_format=torch.channels_last)
    rows_in_order = result.is_contiguous() or result.is_contiguous(memory_format=torch.channels_last)
    if not dense or not rows_in_order:
        raise Unfit
    numbers = stride, padding, dilation, groups, Place.SCRATCH
    in_order = source.is_contiguous() or source.is_contiguous(memory_format=torch.channels_last)
    if transposed:
        columns = kernel.shape[1] * source.shape[3]
        form = _tiles(node, columns, source.shape[2], kernel.shape[0] // groups * kernel.shape[1])
        if not in_order:
            raise Unfit
        return Write(recipes.transposed_convolution, (Out(), x, weight, bias, *numbers), {}, form)
    depthwise = kernel.shape[1] == 1 and groups == source.shape[1] > 1
    plain = not depthwise and tuple(kernel.shape[2:]) == (1, 1) and set(stride) == {1} and not any(padding)
    if depthwise and not kernel.is_contiguous():
        raise Unfit
    form = Form()
    if not depthwise and not (plain and in_order):
        form = _columns(node, kernel.shape, source.shape, stride, padding, dilation, *result.shape[2:])
    return Write(recipes.convolution, (Out(), x, weight, bias, *numbers), {}, form)


def _convolution_pointwise(
    node: fx.Node, x: Any, weight: Any, bias: Any, padding: Any, stride: Any, dilation: Any, groups: int, attr: str,
    scalars: Any, algorithm: str,
) -> Write:  # fmt: skip
    """A convolution, and one activation over its result."""
    if attr not in _ACTIVATIONS or scalars or _value(weight).layout is not torch.strided:
        raise Unfit
    plain = _convolution(node, x, weight, bias, stride, padding, dilation, False, [], groups)
    if plain.form.slices is False:
        raise Unfit
    return dataclasses.replace(
        plain, function=recipes.convolution_then, args=(_ACTIVATIONS[attr], *plain.args), kwargs=plain.kwargs
    )


_ACTIVATIONS = {
    "none": None,
    "relu": aten.relu_.default,
    "hardswish": aten.hardswish_.default,
    "hardsigmoid": aten.hardsigmoid_.default,
    "swish": aten.silu_.default,
    "sigmoid": aten.sigmoid_.default,
    "tanh": aten.tanh_.default,
}
"""What oneDNN's names for activations without numbers mean, over their operand."""


def _columns(
    node: fx.Node, weight: Any, x: Any, stride: Any, padding: Any, dilation: Any, height: int, width: int
) -> Form:
    """Scratch for a tile of a convolution's columns, and for the rows of x that it is gathered from."""
    size = _result(node).element_size()
    bytes_of = []
    for tile in (LEAST_TILE, TILE):
        sizes = weight, x, stride, padding, dilation, height, width
        rows, slab = recipes.tile_rows(tile // size, *sizes)
        bytes_of.append((slab + rows * math.prod(weight[1:]) * width) * size)
    return Form(scratch=bytes_of[0], wish=bytes_of[1])


def _convolution_1d(
    node: fx.Node, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Write:
    result, kernel = _result(node), _value(weight)
    operands = result, kernel, _value(x)
    if not all(t.is_contiguous() and t.numel() for t in operands) or not result.dtype.is_floating_point:
        raise Unfit
    sizes = [1, *stride], [0, *padding], [1, *dilation]
    shapes = [*kernel.shape[:2], 1, kernel.shape[2]], [*operands[2].shape[:2], 1, operands[2].shape[2]]
    form = dataclasses.replace(_columns(node, *shapes, *sizes, 1, result.shape[2]), slices=False)
    return Write(recipes.convolution_1d, (Out(), x, weight, bias, *sizes, groups, Place.SCRATCH), {}, form)


def _safe_softmax(node: fx.Node, x: Any, dim: int, dtype: Any = None) -> Write:
    _same_dtype(node, x)
    value = _value(x)
    if not value.dim() or not value.numel():
        raise Unfit
    rows = value.numel() // value.shape[dim]
    form = Form(scratch=2 * rows * value.element_size(), slices=False)
    infinity = number(-math.inf, node)
    return Write(recipes.safe_softmax, (Out(), x, dim % value.dim(), infinity, Place.SCRATCH), {}, form)


def _scatter(view: OpOverload) -> Callable[..., Write]:
    def recipe(node: fx.Node, x: Any, source: Any, *where: Any) -> Write:
        if any(isinstance(value, fx.Node) for value in where):
            raise Unfit
        return Write(recipes.scatter, (Out(), x, source, view, *where), {}, Form(slices=False))

    return recipe


def _strided_scatter(node: fx.Node, x: Any, source: Any, size: Any, stride: Any, offset: Any) -> Write:
    value = _value(x)
    if _result(node).stride() != value.stride():
        raise Unfit
    place = 0 if offset is None else offset - value.storage_offset()
    return Write(recipes.strided_scatter, (Out(), x, source, size, stride, place), {}, Form(slices=False))


def _pool(node: fx.Node, x: Any, *rest: Any) -> Write | None:
    overload = out_overload(node.target)
    if overload is None or not is_true_out(overload) or _value(x).dim() != 4:
        raise Unfit
    slices = _value(x).is_contiguous() and all(t.is_contiguous() for t in tensors_of(node))
    return Write(recipes.pool, (Place.OUTS, overload, x, *rest), {}, Form(slices=slices))


def _attention(
    node: fx.Node, q: Any, k: Any, v: Any, dropout: float, causal: bool, mask: Any = None, scale: Any = None
) -> Write:
    _same_dtype(node, q, k, v, mask)
    query, key, value = _value(q), _value(k), _value(v)
    log_sums = [user for user in node.users if user.args[1] != 0]
    heads = query.shape[1], key.shape[1], value.shape[1]
    if dropout or len(set(heads)) > 1 or any(user.users for user in log_sums) or not _result(node).numel():
        raise Unfit
    if any(t.stride(-1) != 1 for t in (query, key, value)) or not query.dtype.is_floating_point:
        raise Unfit
    length, keys = query.shape[2], key.shape[2]
    form = _tiles(node, heads[0] * keys, length, slices=False)
    rows = form.wish // (heads[0] * keys * query.element_size())
    future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1) if causal else None
    if scale is None:
        scale = 1 / math.sqrt(query.shape[3])
    return Write(
        recipes.attention,
        (Out(), q, k, v, mask, future, float(scale), Place.SCRATCH),
        {},
        form,
    )


def _embedding(node: fx.Node, weight: Any, index: Any, *rest: Any) -> Write:
    if not _value(index).is_contiguous() or _value(weight).dtype != _result(node).dtype:
        raise Unfit
    return Write(recipes.embedding, (Out(), weight, index), {}, Form(slices=False))


def _pad(node: fx.Node, x: Any, amounts: Any, value: Any = 0) -> Write:
    if min(amounts, default=0) < 0:
        raise Unfit
    return Write(recipes.pad, (Out(), x, list(amounts), value))


def _repeat(node: fx.Node, x: Any, times: Any) -> Write:
    if not _result(node).is_contiguous():
        raise Unfit
    return Write(recipes.repeat, (Out(), x, list(times)), {}, Form(slices=False))


def _masked_fill(node: fx.Node, x: Any, mask: Any, value: Any) -> Write:
    if isinstance(value, fx.Node) or _value(x).shape != _result(node).shape:
        raise Unfit
    _same_dtype(node, x)
    if "inplace" in node.meta:
        return Write(aten.masked_fill_.Scalar, (x, mask, value))
    return Write(recipes.copy_then, (Out(), x, aten.masked_fill_.Scalar, mask, value))


_ANYWHERE = (_copy, _relu, _full, _scalar_tensor, _arange, _rsub, _pad, _masked_fill, _strided_scatter)

_RECIPES: dict[object, Callable[..., Write | None]] = {
    aten.relu.default: _relu,
    aten.clone.default: _copy,
    aten._to_copy.default: _copy,
    aten.zeros.default: _fill(0),
    aten.zeros_like.default: _fill(0),
    aten.new_zeros.default: _fill(0),
    aten.ones.default: _fill(1),
    aten.ones_like.default: _fill(1),
    aten.new_ones.default: _fill(1),
    aten.full.default: _full,
    aten.full_like.default: _full,
    aten.new_full.default: lambda node, like, size, value, *rest: _full(node, like, value),
    aten.fill.Scalar: _fill_like,
    aten.scalar_tensor.default: _scalar_tensor,
    aten.arange.start_step: _arange,
    aten.rsub.Scalar: _rsub,
    aten.rsub.Tensor: _rsub,
    aten.sum.default: _sum_all,
    aten.mean.dim: _mean,
    aten.mean.default: _mean_all,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_group_norm.default: _group_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.convolution.default: _convolution,
    aten._safe_softmax.default: _safe_softmax,
    aten.as_strided_scatter.default: _strided_scatter,
    aten.select_scatter.default: _scatter(aten.select.int),
    aten.slice_scatter.default: _scatter(aten.slice.Tensor),
    aten.max_pool2d_with_indices.default: _pool,
    aten.avg_pool2d.default: _pool,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten.embedding.default: _embedding,
    aten.constant_pad_nd.default: _pad,
    aten.repeat.default: _repeat,
    aten.masked_fill.Scalar: _masked_fill,
}

if (_fused := getattr(torch.ops.mkldnn, "_convolution_pointwise", None)) is not None:  # absent without oneDNN
    _RECIPES[_fused.default] = _convolution_pointwise
