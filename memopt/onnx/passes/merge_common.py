"""Compute once what several nodes compute alike."""

from __future__ import annotations

from typing import Any, ClassVar

import onnx_ir as ir

from memopt.onnx.edit import Edit
from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.read import has_subgraphs, is_random, is_standard, label, opset

# Domains whose operators compute the same twice.
_DETERMINISTIC = {"", "ai.onnx.ml"}


class MergeCommon(OnnxPass):
    """Of several nodes of one graph with the same operator, attributes and inputs keep the first.

    Refusals:
        - The node draws random numbers, or holds graphs, or calls a function or an operator of an unknown domain.
        - A result of the later node is an output of the graph and the result of the first is one too: names differ.

    Nodes in different graphs are left alone: computing one of them outside a branch may be work for nothing.
    """

    name: ClassVar[str] = "merge_common"

    def rewrite(self, edit: Edit) -> None:
        """Walk each graph in order."""
        version = opset(edit.model)
        for graph in edit.graphs():
            seen: dict[tuple[Any, ...], ir.Node] = {}
            for node in list(graph):
                if node.domain not in _DETERMINISTIC or node.overload or has_subgraphs(node):
                    continue
                if is_standard(node, "Constant"):
                    continue
                key = _key(node)
                first = seen.setdefault(key, node)
                if first is node:
                    continue
                if is_random(node, version):
                    edit.refuse(node, f"looks like {label(first)}, but draws random numbers of its own")
                    continue
                _merge(edit, first, node)


def _merge(edit: Edit, first: ir.Node, node: ir.Node) -> None:
    pairs = list(zip(node.outputs, first.outputs, strict=True))
    if not all(edit.can_replace(old, new) for old, new in pairs):
        edit.refuse(node, f"computes what {label(first)} does, but both results are outputs")
        return
    for old, new in pairs:
        edit.replace(old, new)
    name = label(node)
    edit.erase(node)
    edit.change(f"{name} is {label(first)}", (name,), (label(first),))


def _key(node: ir.Node) -> tuple[Any, ...]:
    attributes = tuple(sorted((item.name, item.type.name, _value(item)) for item in node.attributes.values()))
    given = tuple(bool(value.name) for value in node.outputs)
    return node.domain, node.op_type, tuple(None if v is None else id(v) for v in node.inputs), attributes, given


def _value(attribute: ir.Attr) -> str:
    if attribute.type is ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        body = tensor.numpy().tolist() if tensor.dtype is ir.DataType.STRING else tensor.tobytes()
        return repr((tensor.dtype, tuple(tensor.shape), body))
    return repr(attribute.value)
