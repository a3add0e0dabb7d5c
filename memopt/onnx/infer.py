"""Types and shapes of every value, by ONNX's own inference, without the weights and without believing annotations."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from memopt.onnx.read import INFERRED

# Larger initializers are described to the inference by type and shape only: it needs values of shapes, not weights.
_SMALL = 1024


def infer_shapes(model: ir.Model) -> None:
    """Fill in type and shape of every value of the graphs, in place; the declared inputs and outputs stay as they are.

    The inferred shape of a graph output is kept beside the declared one, where `memopt.onnx.read.dims` finds it.
    What the inference cannot say stays unknown.
    """
    found = _inferred(model)
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in graph:
            for value in node.outputs:
                entry = found.get(value.name or "")
                if value.is_graph_output():
                    value.meta[INFERRED] = entry.shape if entry is not None else None
                    if value.type is None and entry is not None:
                        value.type = entry.type
                    continue
                value.shape = entry.shape if entry is not None else None
                if entry is not None and entry.type is not None:
                    value.type = entry.type


def without_inferred(model: ir.Model) -> ir.Model:
    """A copy, sharing the weights, without the types and shapes that ONNX's own inference finds again, word for word.

    They make up most of what a file holds besides weights and nodes. What the inference cannot find stays declared.
    """
    bare = model.clone()
    found = _inferred(bare)
    for graph in (bare.graph, *bare.graph.subgraphs()):
        for node in graph:
            for value in node.outputs:
                entry = found.get(value.name or "")
                known = entry is not None and (value.type, value.shape) == (entry.type, entry.shape)
                if known and not value.is_graph_output():
                    value.type = value.shape = None
        for value in graph.initializers.values():
            if not value.is_graph_input() and not value.is_graph_output():
                value.type = value.shape = None  # its tensor tells
    return bare


def _inferred(model: ir.Model) -> dict[str, ir.TypeAndShape]:
    proto = skeleton(model)
    try:
        proto = onnx.shape_inference.infer_shapes(proto, check_type=False, strict_mode=False, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        return {}  # nothing is known then, and rewrites that ask for shapes refuse
    found: dict[str, ir.TypeAndShape] = {}
    _collect(proto.graph, found)
    return found


def _collect(graph: onnx.GraphProto, found: dict[str, ir.TypeAndShape]) -> None:
    for info in (*graph.value_info, *graph.output):
        if info.type.WhichOneof("value") not in (None, "map_type"):
            found[info.name] = ir.from_proto(info.type)
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _collect(inner, found)


def skeleton(model: ir.Model, *, declared: bool = False) -> onnx.ModelProto:
    """The model as a proto without large weights and without annotations of inner values.

    Args:
        declared: keep the shapes that the model declares of its outputs; the inference had better not believe them.
            Inputs and outputs without any are given one then, because ONNX's checker insists on it.
    """
    bare = model.clone()
    for graph in (bare.graph, *bare.graph.subgraphs()):
        for node in graph:
            for value in node.outputs:
                if not value.is_graph_output():
                    value.type = value.shape = None
                elif not declared:
                    value.shape = None
        for value in (*graph.inputs, *graph.outputs) if declared and graph is bare.graph else ():
            if value.shape is None and isinstance(value.type, ir.TensorType):
                value.shape = ir.Shape([])
        for value in list(graph.initializers.values()):
            tensor = value.const_value
            if tensor is None or tensor.nbytes <= _SMALL:
                continue
            value.shape, value.type = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
            if graph is bare.graph:
                graph.initializers.pop(str(value.name))
                if not value.is_graph_input():
                    graph.inputs.append(value)
    return ir.to_proto(bare)
