"""Remove nodes, constants and functions that no output needs."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from memopt.onnx.edit import Edit, drop_initializer
from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.read import bytes_of, is_standard, label


class EliminateDead(OnnxPass):
    """Remove what no output of the model needs.

    Cases:
        1. A node none of whose results is read or is an output, and then what only it read; in subgraphs as well.
        2. An initializer that nothing reads.
        3. A result that nothing reads of a node whose last results are optional: its name is emptied, so that an
           engine does not compute it (Dropout's mask, MaxPool's indices, LayerNormalization's statistics).
        4. A function that nothing calls.

    ONNX operators have no effects, so that nothing else can be needed. Inputs of the model stay: they are how it is
    called. Results of nodes outside the standard operators are left as they are.
    """

    name: ClassVar[str] = "eliminate_dead"

    def rewrite(self, edit: Edit) -> None:
        """Remove, last node first."""
        for graph in edit.graphs():
            for node in reversed(list(graph)):
                if node.graph is None:
                    continue
                name, count = label(node), edit.erase(node)
                if count:
                    edit.change(f"removed {name}, which nothing reads", (name,))
        for graph in edit.graphs():
            for value in list(graph.initializers.values()):
                size = bytes_of(value)
                if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                    drop_initializer(value)
                    edit.change(f"removed {value.name}: {size} bytes that nothing reads", (str(value.name),))
            for node in graph:
                _drop_results(edit, node)
        _drop_functions(edit)


# Results that may be left out: the first index that may, by operator.
_OPTIONAL_FROM = {"Dropout": 1, "MaxPool": 1, "LayerNormalization": 1}


def _drop_results(edit: Edit, node: ir.Node) -> None:
    first = _OPTIONAL_FROM.get(node.op_type, len(node.outputs)) if is_standard(node) else len(node.outputs)
    keep = len(node.outputs)
    while keep > first and not node.outputs[keep - 1].uses() and not node.outputs[keep - 1].is_graph_output():
        keep -= 1
    if keep < len(node.outputs):
        node.resize_outputs(keep)
        edit.change(f"{label(node)} no longer computes results that nothing reads", (label(node),), (label(node),))


def _drop_functions(edit: Edit) -> None:
    called: set[tuple[str, str, str]] = set()
    work: list[ir.Graph | ir.Function] = [edit.model.graph]
    while work:
        for node in work.pop().all_nodes():
            key = node.op_identifier()
            if key not in called and key in edit.model.functions:
                called.add(key)
                work.append(edit.model.functions[key])
    for key in [key for key in edit.model.functions if key not in called]:
        del edit.model.functions[key]
        edit.change(f"removed function {key[0]}::{key[1]}, which nothing calls", (key[1],))
