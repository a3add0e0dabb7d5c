"""A model as the passes want it: every node named, every value shaped by inference; what is not handled is refused."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from memopt.errors import cause_line
from memopt.onnx.infer import infer_shapes, skeleton
from memopt.onnx.read import graphs


class OnnxModelError(ValueError):
    """The model cannot be handled; the message says why in one line."""


def prepare(model: onnx.ModelProto | ir.Model) -> ir.Model:
    """Return a copy of the model that passes can work on. Tensors are shared with the one given.

    Raises:
        OnnxModelError: the model is broken, or holds what is not handled (map types, training information).
    """
    if isinstance(model, onnx.ModelProto):
        if model.training_info:
            raise OnnxModelError("the model holds training information, which is not handled")
        try:
            model = ir.from_proto(model)
        except Exception as error:  # the reader raises whatever comes up
            raise OnnxModelError(f"the model cannot be read: {cause_line(error)}") from error
    _check_scopes(model)
    copy = model.clone()
    # Before version 4 every initializer had to be an input; later versions allow it, and nothing else differs.
    copy.ir_version = max(copy.ir_version, 4)
    if "ai.onnx" in copy.graph.opset_imports:  # two names of one domain
        copy.graph.opset_imports[""] = copy.graph.opset_imports.pop("ai.onnx")
    try:
        onnx.checker.check_model(skeleton(copy, declared=True))
    except onnx.checker.ValidationError as error:
        raise OnnxModelError(f"the model is invalid: {cause_line(error)}") from error
    taken = {str(node.name) for graph in graphs(copy) for node in graph if node.name}
    seen: set[str] = set()
    for graph in graphs(copy):
        for index, node in enumerate(graph):
            if node.name and node.name not in seen:
                seen.add(node.name)
                continue
            stem = node.outputs[0].name if node.outputs and node.outputs[0].name else f"{node.op_type}_{index}"
            name, number = stem, 1
            while name in taken:
                name, number = f"{stem}_{number}", number + 1
            node.name = name
            taken.add(name)
            seen.add(name)
    infer_shapes(copy)
    return copy


def fix_initializers(model: ir.Model) -> tuple[ir.Model, tuple[str, ...]]:
    """Take the initializers of a prepared model out of its inputs, so that they are constants; return their names too.

    Models before IR version 4 had to list every weight as an input, which a caller may override. This changes how the
    model is called, so that it is for a caller to ask for.
    """
    copy = model.clone()
    names = tuple(str(value.name) for value in copy.graph.inputs if value.is_initializer())
    if not names:
        return model, ()
    kept = [value for value in copy.graph.inputs if not value.is_initializer()]
    copy.graph.inputs.clear()
    copy.graph.inputs.extend(kept)
    infer_shapes(copy)
    return copy, names


def _check_scopes(model: ir.Model) -> None:
    """Refuse graphs that are out of order, or read what nothing makes."""
    known: set[ir.Value] = set()
    for graph in graphs(model):
        known.update(graph.inputs)
        known.update(graph.initializers.values())
    _check_graph(model.graph, known)


def _check_graph(graph: ir.Graph, known: set[ir.Value]) -> None:
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in known:
                raise OnnxModelError(f"{node.op_type} node {node.name} reads {value.name} before anything makes it")
        for attribute in node.attributes.values():
            if attribute.is_ref():
                raise OnnxModelError(f"{node.op_type} node {node.name} refers to an attribute outside a function")
            if attribute.type is ir.AttributeType.GRAPH:
                _check_graph(attribute.as_graph(), known)
            elif attribute.type is ir.AttributeType.GRAPHS:
                for inner in attribute.as_graphs():
                    _check_graph(inner, known)
        known.update(node.outputs)
    for value in graph.outputs:
        if value not in known:
            raise OnnxModelError(f"nothing makes the output {value.name}")
