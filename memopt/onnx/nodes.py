"""An ONNX graph as plain nodes and as readable text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from memopt.difference.digest import bytes_digest
from memopt.difference.graph_diff import GraphNode
from memopt.onnx.read import label

# Attributes that are tensors of more elements than this are shown by a digest.
_SHORT = 16
_SCOPES = "pkg.torch.onnx.name_scopes"


def graph_nodes(model: ir.Model, *, values: bool = False) -> list[GraphNode]:
    """The nodes of a model in order: inputs and initializers first, one output node last.

    Graphs inside nodes (If, Loop, Scan) stand before the node that holds them, with the holder's name as module.

    Args:
        model: read, not changed.
        values: whether to take a digest of each initializer, which reads all of their bytes.
    """
    listing = _Listing(values)
    listing.graph(model.graph, "")
    return listing.found


class _Listing:
    def __init__(self, values: bool) -> None:
        self.values = values
        self.found: list[GraphNode] = []
        self.names: set[str] = set()
        self.maker: dict[ir.Value, tuple[str, str]] = {}  # name of the node that makes a value, and which result it is

    def graph(self, graph: ir.Graph, module: str) -> None:
        """List a graph; only the main one gets an output node."""
        for number, value in enumerate(graph.inputs):
            text = f" {number}" if not module else f" {number} of {_plain(module)}"
            self._input(value, "input", text, module)
        for value in graph.initializers.values():
            if value not in self.maker:
                self._input(value, "initializer", f" {_plain(str(value.name))}", module)
        for node in graph:
            self._node(node, module)
        if module:
            return
        inputs: list[str] = []
        words = [f"{_plain(str(value.name))}: {self._read(value, inputs)}" for value in graph.outputs]
        self._add(GraphNode("output", "output", tuple(inputs), f"({', '.join(words)})"))

    def _input(self, value: ir.Value, kind: str, text: str, module: str) -> None:
        size = 0 if value.const_value is None else int(value.const_value.nbytes)
        digest = ""
        if self.values and value.const_value is not None:
            digest = _digest(value.const_value)
        name = self._add(GraphNode(str(value.name), kind, (), text, _type(value), module, "", digest, size))
        self.maker[value] = (name, "")

    def _node(self, node: ir.Node, module: str) -> None:
        inputs: list[str] = []
        words = ["None" if value is None else self._read(value, inputs) for value in node.inputs]
        for item in node.attributes.values():
            if item.is_ref():
                words.append(f"{item.name}=@{item.ref_attr_name}")
                continue
            graphs = (
                [item.as_graph()]
                if item.type is ir.AttributeType.GRAPH
                else list(item.as_graphs())
                if item.type is ir.AttributeType.GRAPHS
                else []
            )
            if not graphs:
                words.append(f"{item.name}={_plain(_attribute(item.value))}")
            for graph in graphs:
                self.graph(graph, f"{label(node)}/{item.name}")
                words.append(f"{item.name}=[{', '.join(self._read(value, inputs) for value in graph.outputs)}]")
        operator = node.op_type if not node.domain else f"{node.domain}.{node.op_type}"
        outputs = [value for value in node.outputs if value.name]
        result = ", ".join(_type(value) for value in outputs)
        scope = module or _module(node.metadata_props)
        name = self._add(
            GraphNode(label(node), operator, tuple(inputs), f"({', '.join(words)})", result, scope, _source(node))
        )
        for number, value in enumerate(node.outputs):
            self.maker[value] = (name, "" if number == 0 else f":{number}")

    def _read(self, value: ir.Value, inputs: list[str]) -> str:
        name, result = self.maker[value]
        inputs.append(name)
        return f"%{len(inputs) - 1}{result}"

    def _add(self, node: GraphNode) -> str:
        """Put a node on the list, under a name that no other has."""
        name, number = node.name, 1
        while name in self.names:
            name, number = f"{node.name}#{number}", number + 1
        self.names.add(name)
        kept = node if name == node.name else dataclasses.replace(node, name=name)
        self.found.append(kept)
        return name


def _type(value: ir.Value) -> str:
    dtype = "?" if value.dtype is None else value.dtype.name.lower()
    if value.shape is None:
        return dtype
    return f"{dtype}[{', '.join(str(size if isinstance(size, int) else size.value or '?') for size in value.shape)}]"


def _attribute(value: Any) -> str:
    if isinstance(value, ir.TensorProtocol):
        if value.size <= _SHORT:
            return f"{value.dtype.name.lower()}{np.asarray(value.numpy()).tolist()}"
        return f"{value.dtype.name.lower()}{list(value.shape.numpy())} {_digest(value)}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_attribute(item) for item in value)}]"
    return repr(value.decode(errors="replace") if isinstance(value, bytes) else value)


def _digest(tensor: ir.TensorProtocol) -> str:
    kind = f"{tensor.dtype.name}{list(tensor.shape.numpy())}"
    if tensor.dtype is ir.DataType.STRING:
        return bytes_digest(kind, repr(np.asarray(tensor.numpy()).tolist()).encode())
    return bytes_digest(kind, tensor.tobytes())


def _module(metadata: Mapping[str, str]) -> str:
    """The path of the PyTorch module that torch.onnx noted: the last but one of the node's scopes."""
    text = metadata.get(_SCOPES, "")
    scopes = [part.strip(" '\"") for part in text.strip("[]").split(",")]
    return scopes[-2] if len(scopes) > 1 else ""


def _source(node: ir.Node) -> str:
    lines = [line.strip() for line in node.metadata_props.get("pkg.torch.onnx.stack_trace", "").splitlines()]
    places = [index for index, line in enumerate(lines) if line.startswith('File "')]
    if not places:
        return ""
    parts = lines[places[-1]].split(", ")
    code = lines[places[-1] + 1] if places[-1] + 1 < len(lines) else ""
    path = parts[0][len('File "') : -1]
    return f"{path}:{parts[1].removeprefix('line ')}, {code}".rstrip(", ")


def _plain(text: str) -> str:
    return text.replace("%", "%%")
