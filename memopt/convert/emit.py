"""A captured model as an ONNX graph, by the torch.onnx exporter, with names that people can read."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from memopt.common.quiet import quiet
from memopt.convert.capture import Captured
from memopt.convert.errors import ConversionError
from memopt.convert.translations import translations
from memopt.errors import cause_line
from memopt.onnx.origin import origin_of
from memopt.torch_compat import pytree

# What the exporter's own translations are written for: other opsets are reached by converting from it.
DEFAULT_OPSET = 20


def emit(captured: Captured, output_names: Sequence[str], opset: int = DEFAULT_OPSET) -> ir.Model:
    """The captured graph as an ONNX model; its initializers share the memory of the model's tensors.

    onnxscript's optimizer is not run: it folds a training-mode BatchNormalization into Conv, which changes the numbers.

    Raises:
        ConversionError: an operator has no translation, or none at this opset.
    """
    from torch.onnx import OnnxExporterError

    try:
        # With gradients on, the exporter traces attention by another kernel than torch.export did, of another layout.
        with torch.no_grad(), quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                captured.exported,
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=opset,
                custom_translation_table=dict(translations()),
            )
    except OnnxExporterError as error:
        raise ConversionError(f"torch.onnx cannot export the model: {cause_line(error)}") from error
    assert program is not None
    model: ir.Model = program.model
    if model.graph.opset_imports[""] != opset:
        raise ConversionError(
            f"the model needs opset {model.graph.opset_imports['']}: it cannot be written at opset {opset}"
        )
    _rename_axes(model.graph, {axis.symbol: axis.label for axis in captured.axes})
    _distinct_outputs(model.graph)
    if len(model.graph.outputs) != len(output_names):
        raise ConversionError(f"the ONNX graph has {len(model.graph.outputs)} outputs, the model {len(output_names)}")
    for value, name in zip(model.graph.outputs, output_names, strict=True):
        rename(model.graph, value, name)
    _strip(model)
    model.producer_name = "memopt"
    return model


def _strip(model: ir.Model) -> None:
    """Remove the exporter's notes on every node and value: stack traces that outgrow the weights of a small model."""
    for graph in model.graphs():
        graph.metadata_props.clear()
        for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
            value.metadata_props.clear()
        for node in graph:
            node.meta.update(origin_of(node))  # which no file holds
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()
    model.metadata_props.clear()


def output_names(result: Any) -> tuple[str, ...]:
    """A name for each tensor that the model returned: its key, its place, or `output`. None counts for nothing.

    Raises:
        ConversionError: something else is among what it returned.
    """
    leaves, _ = pytree.tree_flatten_with_path(_plain(result))
    found = []
    for path, leaf in leaves:
        if leaf is None:
            continue
        words = [re.sub(r"\W+", "_", str(getattr(key, "key", getattr(key, "idx", key)))).strip("_") for key in path]
        named = "_".join(words) or "output"
        found.append(f"output_{named}" if named[0].isdigit() else named)
        if not isinstance(leaf, torch.Tensor):
            kind = type(leaf).__name__
            raise ConversionError(f"the model returns {found[-1]}, of type {kind}: an ONNX graph returns tensors only")
    return tuple(found)


def tensors(result: Any) -> list[torch.Tensor]:
    """The tensors that the model returned, in the order of `output_names`."""
    return [leaf for leaf in pytree.tree_leaves(_plain(result)) if isinstance(leaf, torch.Tensor)]


def _plain(result: Any) -> Any:
    """Hugging Face's ModelOutput is an ordered dict that flattens without names."""
    return dict(result) if isinstance(result, dict) else result


def _rename_axes(graph: ir.Graph, labels: dict[str, str]) -> None:
    if not labels:
        return
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, labels)) + r")\b")

    def renamed(size: Any) -> Any:
        if isinstance(size, ir.SymbolicDim) and size.value is not None:
            return ir.SymbolicDim(pattern.sub(lambda match: labels[match.group()], str(size.value)))
        return size

    values = {id(value): value for node in graph.all_nodes() for value in node.outputs}
    for value in (*graph.inputs, *graph.outputs, *values.values()):
        if value.shape is not None and not value.shape.is_static():
            value.shape = ir.Shape([renamed(size) for size in value.shape])


def _distinct_outputs(graph: ir.Graph) -> None:
    """ONNX wants each output once, and none that is an input: a copy stands in."""
    seen: set[int] = set()
    for index, value in enumerate(graph.outputs):
        if id(value) in seen or value.producer() is None:
            copy = ir.node("Identity", [value])
            copy.outputs[0].shape, copy.outputs[0].type = value.shape, value.type
            graph.append(copy)
            graph.outputs[index] = copy.outputs[0]
        seen.add(id(value))


def rename(graph: ir.Graph, value: ir.Value, name: str) -> None:
    """Give an output its name; another value of that name gets another."""
    if value.name == name:
        return
    taken = {other.name: other for other in graph.inputs}
    taken.update(graph.initializers)
    taken.update({other.name: other for node in graph.all_nodes() for other in node.outputs})
    final, number = name, 1
    while final in taken and (taken[final].is_graph_input() or taken[final].is_graph_output()):
        final, number = f"{name}_{number}", number + 1
    if final in taken:
        other, number = taken[final], 1
        while f"{final}_inner_{number}" in taken:
            number += 1
        other.name = f"{final}_inner_{number}"
    value.name = final
