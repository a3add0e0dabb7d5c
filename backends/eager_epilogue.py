"""Large results of a program, made by library calls of their own after the rest has run.

A CUDA graph writes to the same memory at every replay, so that what a caller may hold must be copied out of it: two of
each result, and the time of a copy. A large result that a matrix product or a convolution makes at the very end needs
neither: that call is left out of the graph and writes to fresh memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from memopt.backends.aten import Boxed, emit
from memopt.program import InputKind, Output, OutputKind, Program, is_any_view, is_effectful, is_view, tensors_of

Lower = Callable[[fx.GraphModule], Boxed]
Finish = Callable[[Sequence[Any], Sequence[Any], Callable[[Any], Any]], list[Any]]

aten = torch.ops.aten

_LIBRARY_CALLS = frozenset({
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default,
})  # fmt: skip
_LARGE = 1 << 20  # bytes; below, a copy is as cheap as the launch of another kernel


@dataclasses.dataclass(frozen=True)
class Split:
    """A program in two.

    Attributes:
        head: the same inputs; its outputs are the small results in order, then what the tail reads.
        finish: takes the head's outputs, the inputs that are no constants, and what makes the caller's own value from
            a small result; returns the program's outputs.
        constants: what the tail reads of the program's constants, by name; looked up at every call.
    """

    head: Program
    finish: Finish
    constants: dict[str, torch.Tensor]


def split_epilogue(program: Program, lower: Lower = emit) -> Split | None:
    """Cut off the last calls of large results of an inference program; None where there are none.

    Args:
        program: an inference program.
        lower: makes the function of the calls cut off, from a graph whose placeholders have values.
    """
    outputs = program.output_nodes
    chains = [_chain(program, value, entry) for value, entry in zip(outputs, program.outputs, strict=True)]
    tail = {node for chain in chains for node in chain}
    if not tail:
        return None
    read: list[fx.Node] = []
    _with_views_of_inputs(tail)
    for node in program.graph.nodes:
        if node in tail:
            read += [value for value in node.all_input_nodes if value not in tail and value not in read]
    made = [node for node in read if node.op == "call_function"]
    small = [index for index, chain in enumerate(chains) if not chain]
    head = program.copy()
    nodes = {node.name: node for node in head.graph.nodes}
    kept = [nodes[v.name] if isinstance(v, fx.Node) else v for v in (outputs[index] for index in small)]
    output = head.graph.output_node()
    output.args = ((*kept, *(nodes[node.name] for node in made)),)
    output.meta.pop("desc", None)
    head.graph.eliminate_dead_code(
        is_impure_node=lambda node: node.op in ("placeholder", "output") or is_effectful(node)
    )
    entries = [program.outputs[index] for index in small] + [Output(OutputKind.USER)] * len(made)
    head = head.finish(outputs=tuple(entries))
    return Split(head, *_finish(program, tail, read, small, lower))


def _chain(program: Program, value: Any, entry: Output) -> list[fx.Node]:
    """The library call that makes a large result and the views after it; nothing where something else reads them."""
    if not isinstance(value, fx.Node) or entry.kind is not OutputKind.USER:
        return []
    if sum(t.numel() * t.element_size() for t in tensors_of(value)) < _LARGE:
        return []
    chain = [value]
    while is_any_view(chain[-1]) and len(chain[-1].users) == 1:
        source = chain[-1].args[0]
        if not isinstance(source, fx.Node):
            return []
        chain.append(source)
    last = chain[-1]
    alone = all(len(node.users) == 1 for node in chain) and program.output_nodes.count(value) == 1
    return chain if alone and last.target in _LIBRARY_CALLS else []


def _with_views_of_inputs(tail: set[fx.Node]) -> None:
    """Views of inputs are made where they are read."""
    for node in list(tail):
        for value in node.all_input_nodes:
            views = []
            while value.op == "call_function" and is_view(value) and len(value.all_input_nodes) == 1:
                views.append(value)
                value = value.all_input_nodes[0]
            if value.op == "placeholder":
                tail.update(views)


def _finish(
    program: Program, tail: set[fx.Node], read: Sequence[fx.Node], small: Sequence[int], lower: Lower
) -> tuple[Finish, dict[str, torch.Tensor]]:
    graph = fx.Graph()
    nodes = {node: graph.placeholder(node.name) for node in read}
    for node, placeholder in nodes.items():
        placeholder.meta = dict(node.meta)
    for node in program.graph.nodes:
        if node in tail:
            nodes[node] = graph.node_copy(node, lambda n: nodes[n])
    large = [index for index in range(len(program.outputs)) if index not in small]
    graph.output([nodes[program.output_nodes[index]] for index in large])
    run = lower(fx.GraphModule(program.graph_module, graph))
    arguments = [entry.name for entry in program.inputs if entry.kind is not InputKind.CONSTANT]
    position = {name: index for index, name in enumerate(arguments)}
    inputs = [node.name for node in read if node.op == "placeholder"]
    constants = {name: program.state[name] for name in inputs if name not in position}

    def of_input(name: str, values: Sequence[Any]) -> Any:
        return values[position[name]] if name in position else constants[name]

    def finish(outputs: Sequence[Any], values: Sequence[Any], copy: Callable[[Any], Any]) -> list[Any]:
        made = iter(outputs[len(small) :])
        given = [next(made) if node.op == "call_function" else of_input(node.name, values) for node in read]
        results: list[Any] = [None] * len(program.outputs)
        for index, value in zip(small, outputs, strict=False):
            results[index] = copy(value)
        for index, value in zip(large, run(given), strict=True):
            results[index] = value
        return results

    return finish, constants
