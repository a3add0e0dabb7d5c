"""Backward reads an input only where autograd saved that input, and else a copy of it.

Inductor's passes leave out operations that change no value: a copy, a cast to the same type, zeros that are added, a
concatenation of one. Where backward reads the result of one, it would read the input, which a caller may write to
after forward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from memopt.capture.joint import is_tangent
from memopt.graph.fake_calls import apart
from memopt.graph.rewrite import show_again
from memopt.program import shows_operand

_NOTED = "memopt: inputs that backward reads"  # in the metadata of a graph's end


def note_reads(graph: fx.Graph) -> None:
    """Write down at the end of a joint graph the names of the inputs that its backward reads."""
    backward = _backward(graph)
    graph.output_node().meta[_NOTED] = {
        node.name for node in graph.find_nodes(op="placeholder") if any(_reads(node, backward))
    }


def keep_reads(graph: fx.Graph) -> None:
    """Have forward make copies of inputs that backward has come to read since that was noted, for it to read."""
    noted = graph.output_node().meta.pop(_NOTED, None)
    if noted is None:
        return
    backward = _backward(graph)
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node.name in noted or is_tangent(node) or not isinstance(value, torch.Tensor):
            continue
        reads = list(_reads(node, backward))
        if reads and value.layout is torch.strided:
            with graph.inserting_before(next(item for item in graph.nodes if _ends_forward(item, node, backward))):
                copied = graph.call_function(torch.ops.aten.lift_fresh_copy.default, (node,))
            copied.meta = {"val": apart(node.meta["val"]), "partitioner_tag": "is_forward"}
            for *shown, reader in reads:
                with graph.inserting_before(reader):
                    reader.replace_input_with(shown[-1], show_again(graph, shown, copied))


def _ends_forward(node: fx.Node, given: fx.Node, backward: set[fx.Node]) -> bool:
    """Whether a copy of an input is made before this node: an operation of backward, or what writes to the input."""
    return node.op == "call_function" and (
        node in backward or (node.target is torch.ops.aten.copy_.default and node.args[0] is given)
    )


def _backward(graph: fx.Graph) -> set[fx.Node]:
    """What is computed of gradients or for them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        tagged = node.meta.get("partitioner_tag") == "is_backward"
        if node.op != "output" and (tagged or is_tangent(node) or not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _reads(node: fx.Node, backward: set[fx.Node]) -> Iterator[tuple[fx.Node, ...]]:
    """Each way from a node, through views of forward or of backward, to an operation of backward that reads it."""
    for user in node.users:
        if shows_operand(user):
            for chain in _reads(user, backward):
                yield (node, *chain)
        elif user in backward:
            yield node, user
