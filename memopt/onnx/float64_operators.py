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


def _three(inputs: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Two inputs, and a third that may be left out."""
    return inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else None


def _own(run: Any, x: Any, a: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(run(x, **a))


def _window(x: Any, kernel: Any, a: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Strides, dilations and (begin, end) pads per axis."""
    rank, pads, auto_pad = x.ndim - 2, a.get("pads"), a.get("auto_pad")
    strides, dilations = list(a.get("strides") or [1] * rank), list(a.get("dilations") or [1] * rank)
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


class Conv(OpRun):
    """Convolution of one to three dimensions."""

    def _run(self, *inputs: Any, **a: Any) -> tuple[Any, ...]:
        x, w, b = _three(inputs)
        strides, dilations, ends = _window(x, w.shape[2:], a)
        call = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[x.ndim - 3]
        bias = None if b is None else _torch(b)
        return (call(_padded(_torch(x), ends), _torch(w), bias, strides, 0, dilations, a.get("group") or 1).numpy(),)


class ConvTranspose(OpRun):
    """Transposed convolution of one to three dimensions with explicit pads."""

    def _run(self, *inputs: Any, **a: Any) -> tuple[Any, ...]:
        x, w, b = _three(inputs)
        if a.get("output_shape") is not None or a.get("auto_pad") not in (None, "NOTSET", "VALID"):
            raise EngineError("ConvTranspose with output_shape or auto_pad is not evaluated in float64")
        rank = x.ndim - 2
        calls = (
            torch.nn.functional.conv_transpose1d,
            torch.nn.functional.conv_transpose2d,
            torch.nn.functional.conv_transpose3d,
        )
        extra, pads = list(a.get("output_padding") or [0] * rank), list(a.get("pads") or [0] * 2 * rank)
        strides, dilations = list(a.get("strides") or [1] * rank), list(a.get("dilations") or [1] * rank)
        full = calls[rank - 1](_torch(x), _torch(w), None, strides, 0, 0, a.get("group") or 1, dilations).numpy()
        # Output padding extends the far end with what the stride left out; cropping takes pads off both ends.
        ends = [extra[axis] - pads[rank + axis] for axis in range(rank)]
        full = np.pad(full, [(0, 0), (0, 0), *[(0, max(end, 0)) for end in ends]])
        crop = [slice(pads[axis], full.shape[2 + axis] + min(ends[axis], 0)) for axis in range(rank)]
        full = full[(slice(None), slice(None), *crop)]
        return (full if b is None else full + b.reshape(1, -1, *[1] * rank),)


class MaxPool(ReferenceMaxPool):
    """Max pooling without indices and rounding up by torch; the evaluator's own otherwise."""

    def _run(self, *inputs: Any, **a: Any) -> tuple[Any, ...]:
        (x,) = inputs
        if a.get("ceil_mode") or len(self.onnx_node.output) > 1 or x.dtype != np.float64 or x.ndim > 5:
            return _own(super()._run, x, a)
        strides, dilations, ends = _window(x, a["kernel_shape"], a)
        calls = (torch.nn.functional.max_pool1d, torch.nn.functional.max_pool2d, torch.nn.functional.max_pool3d)
        data = _padded(_torch(x), ends, -math.inf)
        return (calls[x.ndim - 3](data, list(a["kernel_shape"]), strides, 0, dilations).numpy(),)


class AveragePool(AveragePool_19):
    """Average pooling without rounding up and dilation by torch; the evaluator's own otherwise."""

    def _run(self, *inputs: Any, **a: Any) -> tuple[Any, ...]:
        (x,) = inputs
        if a.get("ceil_mode") or any(item != 1 for item in a.get("dilations") or ()) or x.ndim > 5:
            return _own(super()._run, x, a)
        kernel = list(a["kernel_shape"])
        strides, _, ends = _window(x, kernel, a)
        calls = (torch.nn.functional.avg_pool1d, torch.nn.functional.avg_pool2d, torch.nn.functional.avg_pool3d)
        call: Any = calls[x.ndim - 3]
        data = _torch(x)
        total = call(_padded(data, ends), kernel, strides)
        if not a.get("count_include_pad"):
            total = total / call(_padded(torch.ones_like(data), ends), kernel, strides)
        return (total.numpy(),)


class LRN(OpRun):
    """Local response normalization across channels."""

    def _run(self, *inputs: Any, **a: Any) -> tuple[Any, ...]:
        (x,) = inputs
        low, high = math.floor((a["size"] - 1) / 2), math.ceil((a["size"] - 1) / 2)
        squares = np.zeros_like(x)
        for channel in range(x.shape[1]):
            window = x[:, max(0, channel - low) : min(x.shape[1], channel + high + 1)]
            squares[:, channel] = np.sum(window**2, axis=1)
        return (x / (a["bias"] + a["alpha"] / a["size"] * squares) ** a["beta"],)


class BatchNormalization(OpRun):
    """Batch normalization in evaluation mode."""

    def _run(self, *inputs: Any, **a: Any) -> tuple[Any, ...]:
        x, scale, bias, mean, var = inputs
        if a.get("training_mode") or a.get("spatial") == 0:
            raise EngineError("BatchNormalization in training mode is not evaluated in float64")
        shape = (1, -1, *[1] * (x.ndim - 2))
        factor = scale / np.sqrt(var + a["epsilon"])
        return (x * factor.reshape(shape) + (bias - mean * factor).reshape(shape),)


class LayerNormalization(OpRun):
    """Layer normalization without narrowing to float32 on the way."""

    def _run(self, *inputs: Any, **a: Any) -> tuple[Any, ...]:
        x, scale, bias = _three(inputs)
        axes = tuple(range(a["axis"] % x.ndim, x.ndim))
        mean = x.mean(axis=axes, keepdims=True)
        inverse = 1.0 / np.sqrt(((x - mean) ** 2).mean(axis=axes, keepdims=True) + a["epsilon"])
        y = (x - mean) * inverse * scale
        return (y if bias is None else y + bias, mean, inverse)[: len(self.onnx_node.output)]


class RMSNormalization(OpRun):
    """Root mean square normalization without narrowing to float32 on the way."""

    def _run(self, *inputs: Any, **a: Any) -> tuple[Any, ...]:
        x, scale = inputs
        axes = tuple(range(a["axis"] % x.ndim, x.ndim))
        return (x / np.sqrt((x**2).mean(axis=axes, keepdims=True) + a["epsilon"]) * scale,)


class Softmax(OpRun):
    """Softmax along one axis; before operator set 13 along all axes from one on."""

    def _run(self, *inputs: Any, **a: Any) -> tuple[Any, ...]:
        (x,) = inputs
        if self.run_params["opsets"][""] >= 13:
            axes: tuple[int, ...] = (a["axis"],)
        else:
            # The evaluator fills in the default of the newest operator set, which is another one.
            given = any(attribute.name == "axis" for attribute in self.onnx_node.attribute)
            axes = tuple(range((a["axis"] if given else 1) % x.ndim, x.ndim))
        powers = np.exp(x - x.max(axis=axes, keepdims=True)) if x.size else x
        return (powers / powers.sum(axis=axes, keepdims=True),)


class GatherElements(OpRun):
    """Elements by index along one axis; the evaluator's own fails on more than 32 rows."""

    def _run(self, *inputs: Any, **a: Any) -> tuple[Any, ...]:
        data, indices = inputs
        axis = a["axis"] % data.ndim
        part = data[tuple(slice(None) if d == axis else slice(0, size) for d, size in enumerate(indices.shape))]
        return (np.take_along_axis(part, indices % data.shape[axis], axis),)


class Erf(OpRun):
    """The error function."""

    def _run(self, *inputs: Any, **a: Any) -> tuple[Any, ...]:
        return (torch.special.erf(_torch(inputs[0])).numpy(),)


class Gelu(OpRun):
    """Gaussian error linear unit, exact or by tanh."""

    def _run(self, *inputs: Any, **a: Any) -> tuple[Any, ...]:
        kind = a.get("approximate") or "none"
        return (torch.nn.functional.gelu(_torch(inputs[0]), approximate=kind).numpy(),)


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
    GatherElements,
)
