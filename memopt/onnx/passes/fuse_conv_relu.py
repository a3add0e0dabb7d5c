"""A convolution and the Relu after it become ONNX Runtime's own operator."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from memopt.graph.rewrite import Refused
from memopt.onnx.edit import Edit
from memopt.onnx.read import is_standard, label, only_user
from memopt.onnx.runtime_pass import OnnxRuntimePass


class FuseConvRelu(OnnxRuntimePass):
    """Relu(Conv(x, w, b)) becomes com.microsoft.FusedConv with activation Relu, which its CPU and CUDA kernels know.

    Refusals:
        - The convolution has other users, or is an output.
        - It is not over two axes of float32: other kernels are not there on every device.
    """

    name: ClassVar[str] = "fuse_conv_relu"
    tolerance: ClassVar[float] = 4.0
    float32_only: ClassVar[bool] = True

    def rewrite(self, edit: Edit) -> None:
        """Walk each graph in order."""
        for graph in edit.graphs():
            for node in list(graph):
                if node.graph is None or not is_standard(node, "Conv"):
                    continue
                value = node.outputs[0]
                if not any(is_standard(use.node, "Relu") for use in value.uses()):
                    continue
                try:
                    _fuse(edit, node)
                except Refused as reason:
                    edit.refuse(node, str(reason))


def _fuse(edit: Edit, node: ir.Node) -> None:
    relu = only_user(node.outputs[0])
    if relu is None:
        raise Refused("what Relu takes of it has other users, or is an output")
    weight = node.inputs[1]
    if weight is None or weight.dtype is not ir.DataType.FLOAT or weight.shape is None or len(weight.shape) != 4:
        raise Refused("it is not a convolution over two axes of float32, which every device has a kernel for")
    names = (label(node), label(relu))
    attributes = {item.name: item.value for item in node.attributes.values()}
    new = edit.node(
        relu,
        "FusedConv",
        list(node.inputs),
        {**attributes, "activation": "Relu"},
        stem=f"{names[0]}_relu",
        domain="com.microsoft",
    )
    edit.replace(relu.outputs[0], new.outputs[0])
    edit.erase(relu)
    edit.change(f"{names[0]} and {names[1]} are one FusedConv", names, (label(new),))
