"""Operators of the reference evaluator in float64 by torch, where its own are slow, narrow to float32, or are wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_average_pool import AveragePool_19
from onnx.reference.ops.op_max_pool import MaxPool as ReferenceMaxPool

from memopt.onnx.engines import EngineError

def _torch(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _window(x: Any, kernel: Any, auto_pad: Any, pads: Any, strides: Any, dilations: Any) -> tuple[Any, Any, Any]:
    """Strides, dilations and (begin, end) pads per axis."""
    rank = x.ndim - 2
    strides, dilations = list(strides or [1] * rank), list(dilations or [1] * rank)
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        ends = []
        for size, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True):
            total = max((math.ceil(size / s) - 1) * s + (k - 1) * d + 1 - size, 0)
            small, large = total // 2, total - total // 2
            ends.append((small, large) if auto_pad == "SAME_UPPER" else (large, small))
    elif auto_pad == "VALID" or pads is None:
        ends = [(0, 0)] * rank
    else:
        ends = list(zip(pads[:rank], pads[rank:], strict=True))
    return strides, dilations, ends


def _padded(x: torch.Tensor, ends: Any, value: float = 0.0) -> torch.Tensor:
    flat = [int(item) for pair in reversed(ends) for item in pair]
    return torch.nn.functional.pad(x, flat, value=value) if any(flat) else x


class Conv(OpRun):  # type: ignore[misc]
    """Convolution of one to three dimensions."""

    def _run(  # noqa: D102
        self, x, w, b=None, auto_pad=None, dilations=None, group=None, kernel_shape=None, pads=None, strides=None
    ):  # type: ignore[no-untyped-def]
        strides, dilations, ends = _window(x, w.shape[2:], auto_pad, pads, strides, dilations)
        call = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[x.ndim - 3]
        data = _padded(_torch(x), ends)
        return (call(data, _torch(w), None if b is None else _torch(b), strides, 0, dilations, group or 1).numpy(),)


class ConvTranspose(OpRun):  # type: ignore[misc]
    """Transposed convolution of one to three dimensions with explicit pads."""

    def _run(  # noqa: D102
        self,
        x,
        w,
        b=None,
        auto_pad=None,
        dilations=None,
        group=None,
        kernel_shape=None,
        output_padding=None,
        output_shape=None,
        pads=None,
        strides=None,
    ):  # type: ignore[no-untyped-def]
        if output_shape is not None or auto_pad not in (None, "NOTSET", "VALID"):
            raise EngineError("ConvTranspose with output_shape or auto_pad is not evaluated in float64")
        rank = x.ndim - 2
        calls = (
            torch.nn.functional.conv_transpose1d,
            torch.nn.functional.conv_transpose2d,
            torch.nn.functional.conv_transpose3d,
        )
        extra = list(output_padding or [0] * rank)
        strides, dilations = list(strides or [1] * rank), list(dilations or [1] * rank)
        pads = list(pads or [0] * 2 * rank)
        full = calls[rank - 1](_torch(x), _torch(w), None, strides, 0, 0, group or 1, dilations).numpy()
        ends = [(0, extra[axis] - pads[rank + axis]) for axis in range(rank)]
        # Output padding extends the far end with what the stride left out; cropping takes pads off both ends.
        full = np.pad(full, [(0, 0), (0, 0), *[(0, max(end, 0)) for _, end in ends]])
        crop = [slice(pads[axis], full.shape[2 + axis] + min(ends[axis][1], 0)) for axis in range(rank)]
        full = full[(slice(None), slice(None), *crop)]
        return (full if b is None else full + b.reshape(1, -1, *[1] * rank),)


class MaxPool(ReferenceMaxPool):  # type: ignore[misc]
    """Max pooling without indices and rounding up by torch; the evaluator's own otherwise."""

    def _run(  # noqa: D102
        self,
        x,
        auto_pad=None,
        ceil_mode=None,
        dilations=None,
        kernel_shape=None,
        pads=None,
        storage_order=None,
        strides=None,
    ):  # type: ignore[no-untyped-def]
        if ceil_mode or len(self.onnx_node.output) > 1 or x.dtype != np.float64 or x.ndim > 5:
            return super()._run(x, auto_pad, ceil_mode, dilations, kernel_shape, pads, storage_order, strides)
        strides, dilations, ends = _window(x, kernel_shape, auto_pad, pads, strides, dilations)
        calls = (torch.nn.functional.max_pool1d, torch.nn.functional.max_pool2d, torch.nn.functional.max_pool3d)
        data = _padded(_torch(x), ends, -math.inf)
        return (calls[x.ndim - 3](data, list(kernel_shape), strides, 0, dilations).numpy(),)


class AveragePool(AveragePool_19):  # type: ignore[misc]
    """Average pooling without rounding up and dilation by torch; the evaluator's own otherwise."""

    def _run(  # noqa: D102
        self,
        x,
        auto_pad=None,
        ceil_mode=None,
        count_include_pad=None,
        dilations=None,
        kernel_shape=None,
        pads=None,
        strides=None,
    ):  # type: ignore[no-untyped-def]
        if ceil_mode or any(item != 1 for item in dilations or ()) or x.dtype != np.float64 or x.ndim > 5:
            return super()._run(
                x,
                auto_pad=auto_pad,
                ceil_mode=ceil_mode,
                dilations=dilations,
                kernel_shape=kernel_shape,
                pads=pads,
                strides=strides,
                count_include_pad=count_include_pad,
            )
        strides, _, ends = _window(x, kernel_shape, auto_pad, pads, strides, None)
        calls = (torch.nn.functional.avg_pool1d, torch.nn.functional.avg_pool2d, torch.nn.functional.avg_pool3d)
        call, data = calls[x.ndim - 3], _torch(x)
        total = call(_padded(data, ends), list(kernel_shape), strides)
        if not count_include_pad:
            total = total / call(_padded(torch.ones_like(data), ends), list(kernel_shape), strides)
        return (total.numpy(),)


class LRN(OpRun):  # type: ignore[misc]
    """Local response normalization across channels."""

    def _run(self, x, alpha=None, beta=None, bias=None, size=None):  # type: ignore[no-untyped-def]  # noqa: D102
        low, high = math.floor((size - 1) / 2), math.ceil((size - 1) / 2)
        squares = np.zeros_like(x)
        for channel in range(x.shape[1]):
            window = x[:, max(0, channel - low) : min(x.shape[1], channel + high + 1)]
            squares[:, channel] = np.sum(window**2, axis=1)
        return (x / (bias + alpha / size * squares) ** beta,)


class BatchNormalization(OpRun):  # type: ignore[misc]
    """Batch normalization in evaluation mode."""

    def _run(  # noqa: D102
        self, x, scale, bias, mean, var, epsilon=None, momentum=None, training_mode=None, spatial=None, is_test=None
    ):  # type: ignore[no-untyped-def]
        if training_mode or spatial == 0:
            raise EngineError("BatchNormalization in training mode is not evaluated in float64")
        shape = (1, -1, *[1] * (x.ndim - 2))
        factor = scale / np.sqrt(var + epsilon)
        return (x * factor.reshape(shape) + (bias - mean * factor).reshape(shape),)


class LayerNormalization(OpRun):  # type: ignore[misc]
    """Layer normalization without narrowing to float32 on the way."""

    def _run(self, x, scale, bias=None, axis=None, epsilon=None, stash_type=None):  # type: ignore[no-untyped-def]  # noqa: D102
        axes = tuple(range(axis % x.ndim, x.ndim))
        mean = x.mean(axis=axes, keepdims=True)
        inverse = 1.0 / np.sqrt(((x - mean) ** 2).mean(axis=axes, keepdims=True) + epsilon)
        y = (x - mean) * inverse * scale
        return (y if bias is None else y + bias, mean, inverse)[: len(self.onnx_node.output)]


class RMSNormalization(OpRun):  # type: ignore[misc]
    """Root mean square normalization without narrowing to float32 on the way."""

    def _run(self, x, scale, axis=None, epsilon=None, stash_type=None):  # type: ignore[no-untyped-def]  # noqa: D102
        axes = tuple(range(axis % x.ndim, x.ndim))
        return (x / np.sqrt((x**2).mean(axis=axes, keepdims=True) + epsilon) * scale,)


class Softmax(OpRun):  # type: ignore[misc]
    """Softmax along one axis; before operator set 13 along all axes from one on."""

    def _run(self, x, axis=None):  # type: ignore[no-untyped-def]  # noqa: D102
        if self.run_params["opsets"][""] >= 13:
            axes: tuple[int, ...] = (axis,)
        else:
            # The evaluator fills in the default of the newest operator set, which is another one.
            given = any(attribute.name == "axis" for attribute in self.onnx_node.attribute)
            axes = tuple(range((axis if given else 1) % x.ndim, x.ndim))
        powers = np.exp(x - x.max(axis=axes, keepdims=True)) if x.size else x
        return (powers / powers.sum(axis=axes, keepdims=True),)


class Erf(OpRun):  # type: ignore[misc]
    """The error function."""

    def _run(self, x):  # type: ignore[no-untyped-def]  # noqa: D102
        return (torch.special.erf(_torch(x)).numpy(),)


class Gelu(OpRun):  # type: ignore[misc]
    """Gaussian error linear unit, exact or by tanh."""

    def _run(self, x, approximate=None):  # type: ignore[no-untyped-def]  # noqa: D102
        data = _torch(x)
        return (torch.nn.functional.gelu(data, approximate=approximate or "none").numpy(),)


OPERATORS: tuple[Any, ...] = (
    Conv,
    ConvTranspose,
    MaxPool,
    AveragePool,
    LRN,
    BatchNormalization,
    LayerNormalization,
    Softmax,
    RMSNormalization,
    Erf,
    Gelu,
)
