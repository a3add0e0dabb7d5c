"""Operators that the torch.onnx exporter has no translation for, as ONNX operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def translations() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """What the exporter is given to translate beside its own, by operator.

    `aten._fused_rms_norm` is what CUDA runs a root-mean-square normalization by; elsewhere it is spelled out before the
    exporter sees it.
    """
    return {torch.ops.aten._fused_rms_norm.default: _rms_norm}


def _rms_norm(
    input: Any,  # the operator's own names
    normalized_shape: Sequence[int],
    weight: Any = None,
    eps: float | None = None,
) -> tuple[Any, Any]:
    """Of x: x / √(mean of x² over the last axes + ε) · weight, and the reciprocal root; in float32 or wider."""
    import onnx_ir as ir
    import onnxscript

    op: Any = onnxscript.opset18
    narrow = input.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    kind = torch.float64 if input.dtype is ir.DataType.DOUBLE else torch.float32
    x = op.Cast(input, to=ir.DataType.FLOAT) if narrow else input
    axes = op.Constant(value_ints=list(range(-len(normalized_shape), 0)))
    mean = op.ReduceMean(op.Mul(x, x), axes, keepdims=1)
    epsilon = ir.tensor(torch.tensor(torch.finfo(kind).eps if eps is None else eps, dtype=kind).numpy())
    inverse = op.Reciprocal(op.Sqrt(op.Add(mean, op.Constant(value=epsilon))))
    result = op.Mul(x, inverse)
    if weight is not None:
        result = op.Mul(result, op.Cast(weight, to=ir.DataType.FLOAT) if narrow else weight)
    return (op.Cast(result, to=input.dtype) if narrow else result), inverse
