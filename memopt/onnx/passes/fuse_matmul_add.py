"""A matrix product and a bias become one Gemm."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from memopt.graph.rewrite import Refused
from memopt.onnx.edit import Edit
from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.read import argument, constant, dims, is_standard, label, only_user, opset, producer

_TYPES = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16}


class FuseMatmulAdd(OnnxPass):
    """Add(MatMul(a, b), c) of matrices becomes Gemm(a, b, c): one result less is held, and the bias is not added apart.

    Cases:
        1. MatMul of two matrices, then Add of a constant vector, row or scalar, in any order.
        2. A transposed operand, Transpose with perm [1, 0], of the MatMul or of a Gemm becomes transA or transB.

    Refusals:
        - An operand has more than two axes, or an unknown number: Gemm takes matrices only (a Reshape around it would
          cost what the fusion saves).
        - The product has other users, or is an output.
        - The bias is computed, or would widen the product's shape; types that Gemm has no kernels for.
        - Operator sets before 11.
    """

    name: ClassVar[str] = "fuse_matmul_add"
    tolerance: ClassVar[float] = 4.0

    def rewrite(self, edit: Edit) -> None:
        """Walk each graph in order."""
        if opset(edit.model) < 11:
            return
        for graph in edit.graphs():
            for node in list(graph):
                if node.graph is None or not is_standard(node, "Add"):
                    continue
                try:
                    _fuse(edit, node)
                except Refused as reason:
                    edit.refuse(node, str(reason))
            for node in list(graph):
                if is_standard(node, "Gemm"):
                    _transposes(edit, node)


def _fuse(edit: Edit, node: ir.Node) -> None:
    for place in (0, 1):
        product = producer(argument(node, place), "MatMul")
        bias = argument(node, 1 - place)
        if product is not None and constant(bias) is not None:
            break
    else:
        return
    left, right = product.inputs
    ranks = [dims(left), dims(right)]
    if any(rank is None or len(rank) != 2 for rank in ranks):
        raise Refused(f"an operand of {label(product)} is no matrix, as Gemm wants it")
    if only_user(product.outputs[0]) is not node:
        raise Refused(f"the result of {label(product)} has other users, or is an output")
    array, columns = constant(bias), (ranks[1] or [None])[-1]
    assert array is not None
    shape = list(array.shape)
    if len(shape) > 2 or (len(shape) == 2 and shape[0] != 1) or (shape and shape[-1] not in (1, columns)):
        raise Refused("the bias is no row, or would widen the product")
    if left is None or left.dtype not in _TYPES:
        raise Refused("Gemm is for floating-point numbers of 16, 32 and 64 bits")
    names = (label(product), label(node))
    new = edit.node(node, "Gemm", [left, right, bias], stem=f"{names[0]}_gemm")
    edit.replace(node.outputs[0], new.outputs[0])
    edit.erase(node)
    edit.change(f"{names[0]} and {names[1]} are one Gemm", names, (label(new),))


def _transposes(edit: Edit, node: ir.Node) -> None:
    for place, name in ((0, "transA"), (1, "transB")):
        turned = producer(argument(node, place), "Transpose")
        if turned is None:
            continue
        order = turned.attributes["perm"].as_ints() if "perm" in turned.attributes else None
        source = turned.inputs[0]
        if source is None or len(dims(source) or ()) != 2 or order not in (None, (1, 0)):
            continue
        flag = node.attributes[name].as_int() if name in node.attributes else 0
        node.attributes.add(ir.AttrInt64(name, 1 - flag))
        node.replace_input_with(place, source)
        names = (label(turned), label(node))
        edit.erase(turned)
        edit.change(f"{names[0]} is {name} of {names[1]}", names, (names[1],))
