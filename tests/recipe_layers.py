"""Steps of random recipes that compute: reductions, products, layers."""

from __future__ import annotations

import torch

from tests.recipe_builder import Builder, broadcasts, is_float, is_number, name_of


def reduce(b: Builder) -> None:
    x = b.pick(lambda v: is_float(v) and v.dim() > 0 and v.numel() > 0)
    if x is None:
        return
    value = b.values[x]
    op = b.choose(
        ["sum", "mean", "amax", "var", "sum_all", "cumsum", "softmax", "log_softmax", "hand_softmax", "logsumexp"]
    )
    keep = (b.choose([False, True]),) if op in ("sum", "mean", "amax", "var") else ()
    b.add(op, (x,), (b.dim(value), *keep) if op != "sum_all" else (), rounds=True)


def product(b: Builder) -> None:
    x = b.pick(lambda v: is_float(v) and v.dim() in (2, 3) and v.numel() > 0)
    if x is None:
        return
    value = b.values[x]
    rows, width = value.shape[-2:]
    if value.dim() == 3:
        op = b.choose(["bmm", "bmm_add", "baddbmm", "matmul", "linear", "linear_bias", "attention"])
        right = b.pick(lambda v: v.dim() == 3 and v.dtype == value.dtype and v.shape[:2] == (value.shape[0], width))
    else:
        op = b.choose(["mm", "mm_add", "add_mm", "mm_sub", "addmm", "mm_add", "linear", "linear_bias"])
        right = b.pick(lambda v: v.dim() == 2 and v.dtype == value.dtype and v.shape[0] == width)
    if op == "attention":
        b.add(op, (x, x, x), rounds=True)
        return
    if op.startswith("linear") or op == "matmul":
        size = b.choose([3, 4])
        weight = b.weight((width, size) if op == "matmul" else (size, width), value)
        more = (b.weight((size,), value),) if op == "linear_bias" else ()
        b.add(op, (x, weight, *more), rounds=True)
        return
    if right is None:
        shape = (value.shape[0], width, 4) if value.dim() == 3 else (width, 4)
        right = b.weight(shape, value)
    if op in ("mm", "bmm"):
        b.add(op, (x, right), rounds=True)
        return
    shape = torch.Size((*value.shape[:-1], b.values[right].shape[-1]))
    addend = b.pick(lambda v: is_number(v) and broadcasts(v.shape, shape))
    if addend is None or b.chance(2):
        addend = b.weight(b.choose([shape[-1:], shape, (1, shape[-1]), (rows, 1), ()]), value)
    b.add(op, (x, right, addend), (b.choose([1, 2, 0]), b.choose([1, 0.5])) if op == "addmm" else (), rounds=True)


def layer(b: Builder) -> None:
    x = b.pick(lambda v: is_float(v) and v.dim() in (2, 3, 4) and 0 not in v.shape)
    if x is None:
        return
    value = b.values[x]
    channels, size = value.shape[1], b.choose([4, 2])
    groups = 2 if channels % 2 == 0 and b.chance(3) else 1
    ops = ["layer_norm", "layer_norm_affine", "batch_norm", "batch_norm", "group_norm"]
    if value.dim() == 3:
        ops += ["conv1d"] * 3
    if value.dim() == 4:
        ops += ["conv2d", "conv2d_bias", "conv_transpose2d"] * 2 + ["max_pool2d", "avg_pool2d", "global_pool"]
    op = b.choose(ops)
    if op == "batch_norm":
        _batch_norm(b, x)
    elif op == "layer_norm_affine":
        b.add(op, (x, b.weight(value.shape[-1:], value), b.weight(value.shape[-1:], value)), rounds=True)
    elif op == "group_norm":
        b.add(op, (x,), (groups,), rounds=True)
    elif op.startswith("conv"):
        kernel = (b.choose([1, 2, 3]),) * (value.dim() - 2)
        if op == "conv_transpose2d":
            shape, params = (channels, size, *kernel), (b.choose([1, 2]), groups)
            bias = (b.weight((size * groups,), value),)
        else:
            shape = (size, channels // groups, *kernel)
            params = (b.choose([1, 2]), b.choose([0, 1]), groups)
            bias = (b.weight((size,), value),) if op == "conv2d_bias" else ()
        reused = b.pick(lambda v: v.shape == shape and v.dtype == value.dtype) if b.chance(4) else None
        result = b.add(op, (x, b.weight(shape, value) if reused is None else reused, *bias), params, rounds=True)
        if result is not None and b.chance(2):
            _batch_norm(b, result)
    else:
        b.add(op, (x,), rounds=True)


def _batch_norm(b: Builder, x: int) -> None:
    value = b.values[x]
    size, style = (value.shape[1],), "positive"
    dtype = name_of(value)
    statistics = (b.leaf("buffer", size, dtype), b.leaf("buffer", size, dtype, style))
    affine = (b.leaf("parameter", size, dtype, style), b.leaf("parameter", size, dtype))
    if b.training and b.chance(2):
        b.add("batch_norm_train", (x, *statistics, *affine), rounds=True)
    elif b.chance(4):
        b.add("batch_norm_plain", (x, *statistics), rounds=True)
    else:
        b.add("batch_norm", (x, *statistics, *affine), rounds=True)
