"""Operators of the engines below ATen that compute a layer and its activation at once: one table, by device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memopt.graph.propagation import fake_mode
from memopt.patterns.clamps import bounds_of
from memopt.program import Program
from memopt.torch_compat.dispatch import has_kernel
from memopt.torch_compat.operators import convolution_library

aten = torch.ops.aten
LAYERS = {aten.addmm.default: "addmm", aten.convolution.default: "convolution"}


@dataclasses.dataclass(frozen=True)
class Activation:
    """An element-wise activation by name, with its parameters: the slope of leaky_relu, the bounds of hardtanh."""

    name: str
    parameters: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class FusedOp:
    """One engine operator.

    Attributes:
        layer: "addmm", "convolution", or "convolution_add" (a convolution, an addition, then the activation).
        keeps_nan: whether NaN stays NaN. The fused ReLUs and clamps of cuBLASLt, cuDNN and oneDNN may turn it into a
            number. (Infinity becomes NaN in oneDNN's erf GELU, which is what `aten.gelu` runs on the CPU too.)
        unfit: says why the operator cannot or should not stand for a layer's node; None when it can.
        build: the operator and its arguments, from the layer's node, the addend or None, and the activation.
    """

    device: str
    layer: str
    activation: str
    dtypes: frozenset[torch.dtype]
    keeps_nan: bool
    unfit: Callable[[Program, fx.Node], str | None]
    build: Callable[[fx.Node, fx.Node | None, Activation], tuple[Any, tuple[Any, ...], dict[str, Any]]]


def activation_of(node: fx.Node) -> Activation | None:
    """The activation that the node computes of its one operand; None when it is none of the table's."""
    if node.target in _PLAIN:
        return Activation(_PLAIN[node.target])
    if node.target is aten.gelu.default:
        approximate = node.args[1] if len(node.args) > 1 else node.kwargs.get("approximate", "none")
        return Activation("gelu" if approximate == "none" else "gelu_tanh")
    if node.target is aten.leaky_relu.default:
        slope = node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01)
        return Activation("leaky_relu", (float(slope),))  # type: ignore[arg-type]
    bounds = bounds_of(node)
    if bounds is None:
        return None
    if bounds.call(node)[0] is aten.relu.default:
        return Activation("relu")
    return Activation("hardtanh", (bounds.low, bounds.high))


def fused_op(device: str, layer: str, activation: Activation) -> FusedOp | None:
    """The engine operator for a layer and an activation on a device type; None when there is none."""
    for entry in FUSED_OPS:
        if (entry.device, entry.layer, entry.activation) == (device, layer, activation.name):
            return entry
    return None


_PLAIN = {
    aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
    aten.silu.default: "silu",
    aten.hardswish.default: "hardswish",
    aten.hardsigmoid.default: "hardsigmoid",
    aten.mish.default: "mish",
    aten.elu.default: "elu",
}

# -- whether an operator fits -----------------------------------------------------------------------------------


def _always(program: Program, layer: fx.Node) -> str | None:
    return None


def _onednn(program: Program, layer: fx.Node) -> str | None:
    data, weight, bias, stride, padding, dilation, transposed, output_padding, groups = layer.args
    if transposed:
        return "the engine has no such operator for transposed convolutions"
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not hasattr(torch.ops.mkldnn, "_convolution_pointwise"):
        return "this build of torch has no oneDNN"
    with fake_mode(program.graph_module):
        values = fx.map_arg((data, weight, bias), lambda node: node.meta["val"])
        library = convolution_library(values, stride, padding, dilation, False, output_padding, groups)
    if library != "Mkldnn":
        return "oneDNN does not run this convolution: it is faster elsewhere, or oneDNN is off"
    return _channels_last(layer)


def _cudnn(program: Program, layer: fx.Node) -> str | None:
    if layer.args[6]:
        return "the engine has no such operator for transposed convolutions"
    if not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return "this build of torch has no cuDNN"
    if layer.args[8] != 1:
        return "cuDNN's fused operator is several times slower on grouped convolutions"
    return _channels_last(layer)


def _channels_last(layer: fx.Node) -> str | None:
    value = layer.meta["val"]
    if value.ndim != 4:
        return "the fused operator is for two dimensions"
    if value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous():
        return None
    return "its result is not channels-last: the fused operator would take more memory, or lay it out otherwise"


# -- how an operator is called ----------------------------------------------------------------------------------

_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _addmm_activation(layer: fx.Node, addend: fx.Node | None, activation: Activation) -> _Call:
    kwargs = {**layer.kwargs, "use_gelu": activation.name != "relu"}
    return aten._addmm_activation.default, layer.args, kwargs


def _convolution_pointwise(layer: fx.Node, addend: fx.Node | None, activation: Activation) -> _Call:
    data, weight, bias, stride, padding, dilation, _, _, groups = layer.args
    attribute, algorithm = _ONEDNN_NAMES.get(activation.name, (activation.name, ""))
    arguments = (padding, stride, dilation, groups, attribute, list(activation.parameters), algorithm)
    return torch.ops.mkldnn._convolution_pointwise.default, (data, weight, bias, *arguments), {}


def _cudnn_relu(layer: fx.Node, addend: fx.Node | None, activation: Activation) -> _Call:
    data, weight, bias, stride, padding, dilation, _, _, groups = layer.args
    if addend is None:
        return aten.cudnn_convolution_relu.default, (data, weight, bias, stride, padding, dilation, groups), {}
    arguments = (data, weight, addend, 1.0, bias, stride, padding, dilation, groups)
    return aten.cudnn_convolution_add_relu.default, arguments, {}


# -- the table --------------------------------------------------------------------------------------------------

_HALVES = frozenset({torch.float16, torch.bfloat16})
_UP_TO_SINGLE = _HALVES | {torch.float32}
_FLOATS = _UP_TO_SINGLE | {torch.float64}
_SINGLE = frozenset({torch.float32})
_ONEDNN_NAMES = {"silu": ("swish", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}

FUSED_OPS: tuple[FusedOp, ...] = (
    FusedOp("cpu", "addmm", "relu", _FLOATS, True, _always, _addmm_activation),
    # The same flag means erf on the CPU and tanh on CUDA, where cuBLASLt's GELU is coarser than float32.
    FusedOp("cpu", "addmm", "gelu", _FLOATS, True, _always, _addmm_activation),
    FusedOp("cuda", "addmm", "relu", _UP_TO_SINGLE, False, _always, _addmm_activation),
    FusedOp("cuda", "addmm", "gelu_tanh", _HALVES, True, _always, _addmm_activation),
    *(
        FusedOp("cpu", "convolution", name, _SINGLE, True, _onednn, _convolution_pointwise)
        for name in ("sigmoid", "tanh", "silu", "hardswish", "leaky_relu", "gelu", "gelu_tanh")
    ),
    *(
        FusedOp("cpu", "convolution", name, _SINGLE, False, _onednn, _convolution_pointwise)
        for name in ("relu", "hardtanh", "hardsigmoid")
    ),
    FusedOp("cuda", "convolution", "relu", _UP_TO_SINGLE, False, _cudnn, _cudnn_relu),
    FusedOp("cuda", "convolution_add", "relu", _UP_TO_SINGLE, False, _cudnn, _cudnn_relu),
)

# -- fake kernels that torch lacks: without them cuDNN would run for real wherever a program is checked ----------


def _fake_cudnn(data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *geometry: Any) -> torch.Tensor:
    stride, padding, dilation, groups = geometry
    plain: torch.Tensor = aten.convolution.default(data, weight, bias, stride, padding, dilation, False, [0, 0], groups)
    last = any(not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last) for t in (data, weight))
    return plain.contiguous(memory_format=torch.channels_last) if last else plain


def _fake_cudnn_add(data: Any, weight: Any, addend: Any, alpha: Any, bias: Any, *geometry: Any) -> torch.Tensor:
    return _fake_cudnn(data, weight, bias, *geometry)


_LIBRARY = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
for _name, _kernel in (
    ("cudnn_convolution_relu", _fake_cudnn),
    ("cudnn_convolution_add_relu", _fake_cudnn_add),
):
    if not has_kernel(f"aten::{_name}", "Meta"):
        _LIBRARY.impl(_name, _kernel)  # type: ignore[no-untyped-call]
