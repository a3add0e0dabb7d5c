"""Fold batch normalization, and scaling by channel, into the weights of the layer before."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from memopt.graph.rewrite import Refused
from memopt.onnx.constants import evaluated
from memopt.onnx.edit import Edit
from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.read import argument, attribute, constant, dims, is_standard, label, only_user, opset, producer

Array = np.ndarray[Any, Any]
Known = Mapping[ir.Value, Array]


_LAYERS = ("Conv", "ConvTranspose", "Gemm")


class FuseConvBn(OnnxPass):
    """Fold a batch normalization in evaluation mode into the weights of the layer that feeds it.

    Algebra: with s = scale / sqrt(variance + epsilon), batch normalization gives, channel by channel,
    s·(Wx + b - mean) + shift = (s·W)x + (s·(b - mean) + shift).
    The products are computed in float64 and cast once, to the weight's type.

    Cases:
        1. Conv of any rank, grouped or not: s scales axis 0 of W.
        2. ConvTranspose: W is [in, out / groups, ...], so s scales axis 1, group by group.
        3. Gemm, W behind transB or not: s scales the output features. beta and alpha are kept right.
        4. A Mul or an Add (in any order) of a constant per channel after Conv or ConvTranspose, likewise.
        A layer without bias gets one. Bias and vectors may be computed from constants.

    Refusals:
        - The layer's result has other users, or is an output.
        - A weight or bias is shared (a folded copy would come on top of it) or computed, or a caller may override it.
        - The batch normalization is in training mode, not per channel (operator sets before 9), or has other results.
        - A batch normalization before its layer: at zero padding its shift is missing.
        - Types differ, or a folded value is not finite.
    """

    name: ClassVar[str] = "fuse_conv_bn"
    tolerance: ClassVar[float] = 4.0

    def rewrite(self, edit: Edit) -> None:
        """Walk each graph in order; a chain of scalings folds one after the other."""
        layers = any(is_standard(node, *_LAYERS) for graph in edit.graphs() for node in graph)
        known = evaluated(edit.model) if layers else {}
        for graph in edit.graphs():
            for node in list(graph):
                if node.graph is None or not is_standard(node, "BatchNormalization", "Mul", "Add"):
                    continue
                try:
                    _fold(edit, node, known)
                except Refused as reason:
                    edit.refuse(node, str(reason))


@dataclasses.dataclass(frozen=True)
class _Scaling:
    """y = factor·x + shift, one of each per channel, in float64."""

    factor: Array
    shift: Array


def _fold(edit: Edit, node: ir.Node, known: Known) -> None:
    norm = node.op_type == "BatchNormalization"
    places = (0,) if norm else (0, 1)
    found = [(producer(argument(node, place), *_LAYERS), place) for place in places]
    layer, place = next(((made, place) for made, place in found if made is not None), (None, 0))
    if layer is None:
        if norm and any(is_standard(use.node, "Conv") for use in node.outputs[0].uses()):
            raise Refused("it precedes its convolution: at zero padding its shift would be missing")
        return
    version = opset(edit.model)
    if not norm and (layer.op_type == "Gemm" or constant(argument(node, 1 - place)) is None or version < 7):
        return
    weight = constant(argument(layer, 1))
    if norm:
        _check_norm(node, version)
    if version < 7 and layer.op_type == "Gemm":
        raise Refused(f"operator set {version} broadcasts by attributes")
    if weight is None:
        raise Refused(f"the weight of {label(layer)} is computed, or may be overridden")
    if only_user(layer.outputs[0]) is not node:
        raise Refused(f"the result of {label(layer)} has other users, or is an output")
    channels = _channels(layer, weight)
    scaling = _norm_scaling(node, known) if norm else _channel_scaling(node, layer, 1 - place, channels)
    if scaling is None:
        return
    if scaling.factor.shape != (channels,):
        raise Refused(f"{label(layer)} has {channels} channels, it has {scaling.factor.size}")
    _write(edit, node, layer, weight, scaling, known)


def _check_norm(node: ir.Node, version: int) -> None:
    if attribute(node, "training_mode", 0) or (version < 7 and not attribute(node, "is_test", 0)):
        raise Refused("it is in training mode: it normalizes by the statistics of the batch")
    if version < 9 and not attribute(node, "spatial", 1):
        raise Refused("it normalizes each position by itself")
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        raise Refused("its statistics are read")


def _channels(layer: ir.Node, weight: Array) -> int:
    if layer.op_type == "Conv":
        return int(weight.shape[0])
    if layer.op_type == "ConvTranspose":
        return int(weight.shape[1]) * int(attribute(layer, "group", 1))
    return int(weight.shape[0 if attribute(layer, "transB", 0) else 1])


def _known(node: ir.Node, index: int, known: Known) -> Array:
    value = argument(node, index)
    array = constant(value)
    if array is None and value is not None:
        array = known.get(value)
    if array is None:
        raise Refused(f"{'an input' if value is None else value.name} is computed, or may be overridden")
    return array.astype(np.float64).reshape(-1)


def _norm_scaling(node: ir.Node, known: Known) -> _Scaling:
    scale, shift, mean, variance = (_known(node, index, known) for index in range(1, 5))
    factor = scale / np.sqrt(variance + float(attribute(node, "epsilon", 1e-5)))
    return _Scaling(factor, shift - factor * mean)


def _channel_scaling(node: ir.Node, layer: ir.Node, place: int, channels: int) -> _Scaling | None:
    """The scaling of a Mul or an Add by a constant of one number per channel; None for any other constant."""
    array, shape = constant(argument(node, place)), dims(layer.outputs[0])
    if array is None or shape is None or array.dtype.kind != "f" or array.ndim > len(shape):
        return None
    aligned = [1] * (len(shape) - array.ndim) + list(array.shape)
    if any(size != 1 for axis, size in enumerate(aligned) if axis != 1) or aligned[1] not in (1, channels):
        return None
    numbers = np.broadcast_to(array.astype(np.float64).reshape(-1), (channels,))
    if node.op_type == "Mul":
        return _Scaling(numbers, np.zeros(channels))
    return _Scaling(np.ones(channels), numbers)


def _write(edit: Edit, node: ir.Node, layer: ir.Node, weight: Array, scaling: _Scaling, known: Known) -> None:
    place, bias_value = argument(layer, 1), argument(layer, 2)
    bias = constant(bias_value)
    if bias is None and bias_value is not None:
        bias = known.get(bias_value)
    if bias_value is not None and bias is None:
        raise Refused(f"the bias of {label(layer)} is computed, or may be overridden")
    for value in (place, bias_value):
        shared = value is not None and value.is_initializer() and len(list(value.uses())) > 1
        if value is not None and (shared or value.is_graph_output()):
            raise Refused(f"{value.name}, which {label(layer)} reads, is shared")
    if weight.dtype.kind != "f" and weight.dtype.name != "bfloat16":
        raise Refused(f"the weight of {label(layer)} is {weight.dtype}")
    types = {value.dtype for value in (place, *node.inputs, *node.outputs[:1]) if value is not None and value.dtype}
    if len(types) > 1:
        raise Refused("types differ: " + ", ".join(sorted(item.name for item in types)))
    attributes = {}
    first = np.zeros(1) if bias is None else bias.astype(np.float64)
    if layer.op_type == "Gemm":
        first = first * float(attribute(layer, "beta", 1.0))
        attributes["beta"] = 1.0
        if first.ndim > 1 and first.shape[0] != 1:
            raise Refused(f"the bias of {label(layer)} is no vector")
    first = np.broadcast_to(first.reshape(-1), scaling.factor.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = _scaled(layer, weight.astype(np.float64), scaling.factor).astype(weight.dtype)
        added = (first * scaling.factor + scaling.shift).astype(weight.dtype)
    if not (np.isfinite(scaled.astype(np.float64)).all() and np.isfinite(added.astype(np.float64)).all()):
        raise Refused("a folded value is not finite")
    graph = layer.graph
    assert graph is not None
    stem = label(layer)
    inputs = [layer.inputs[0], edit.initializer(graph, f"{stem}_weight_folded", scaled)]
    inputs.append(edit.initializer(graph, f"{stem}_bias_folded", added))
    kept = {item.name: item.value for item in layer.attributes.values()}
    new = edit.node(node, layer.op_type, inputs, {**kept, **attributes}, stem=f"{stem}_folded")
    names = (stem, label(node))
    edit.replace(node.outputs[0], new.outputs[0])
    edit.erase(node)
    edit.change(f"folded {node.op_type} {names[1]} into the weights of {stem}", names, (label(new),))


def _scaled(layer: ir.Node, weight: Array, factor: Array) -> Array:
    trailing = [1] * (weight.ndim - 2)
    if layer.op_type == "Conv":
        return weight * factor.reshape(-1, 1, *trailing)
    if layer.op_type == "Gemm":
        return weight * (factor.reshape(-1, 1) if attribute(layer, "transB", 0) else factor)
    groups = int(attribute(layer, "group", 1))
    # Rows of one group of inputs feed one group of outputs: one row of factors per input channel.
    rows: Array = np.repeat(factor.reshape(groups, -1), weight.shape[0] // groups, axis=0)
    result: Array = weight * rows.reshape(*rows.shape, *trailing)
    return result
