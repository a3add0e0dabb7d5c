"""What several rewrites share: storages in the metadata, constants added and dropped, dead nodes erased, new ones,
views of copies.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memopt.graph.propagation import fake_mode
from memopt.graph.weights import joined, only
from memopt.program import Input, InputKind, Program, is_effectful, tensors_of
from memopt.torch_compat.fake_tensors import no_fake_mode
from memopt.torch_compat.storages import id_of_storage


class Refused(Exception):
    """Raised while a pass matches one rewrite: it is not made, for the reason given."""


VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})
"""What gives a tensor another shape, its elements in the same order and place."""

ALLOWANCE = 64 * 1024
"""Bytes by which one run of a pass may let a program grow, all of its rewrites together."""


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that they are computed from."""
    return _reached(nodes, lambda node: node.all_input_nodes)


def descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that is computed from them."""
    return _reached(nodes, lambda node: node.users)


def _reached(nodes: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    work = list(nodes)
    while work:
        node = work.pop()
        if node not in found:
            found.add(node)
            work.extend(step(node))
    return found


def storages(node: fx.Node) -> dict[int, int]:
    """The storages of the node's value, as key → bytes; nodes that share a key alias each other.

    Read from `meta["val"]`, which `Program.finish` fills in with aliasing kept: right until the graph is edited in a
    way that gives a node another layout.
    """
    found: dict[int, int] = {}
    for value in tensors_of(node):
        if value.layout is torch.strided:
            storage = value.untyped_storage()
            found[id_of_storage(storage)] = int(storage.nbytes())
        else:
            found[id(value)] = int(value.numel() * value.element_size())
    return found


def returned_storages(program: Program) -> set[int]:
    """Keys of the storages that the caller gets hold of through an output, and may write to."""
    return {key for value in program.output_nodes if isinstance(value, fx.Node) for key in storages(value)}


def erase_unused(graph: fx.Graph, nodes: Iterable[fx.Node]) -> list[str]:
    """Erase those of the given call nodes that have no users, and what only they used; return the erased names.

    Effectful and random nodes and placeholders stay.
    """
    erased: dict[fx.Node, None] = {}
    work = list(nodes)
    while work:
        node = work.pop()
        if node in erased or node.users or node.op != "call_function" or is_effectful(node):
            continue
        work.extend(node.all_input_nodes)
        graph.erase_node(node)
        erased[node] = None
    return [node.name for node in erased]


def add_constant(program: Program, name: str, value: torch.Tensor) -> tuple[fx.Node, Program]:
    """Give a program that is being edited a new CONSTANT input that holds `value`.

    Args:
        program: the copy being edited; its graph gets the placeholder, after the ones that are there.
        name: what to call it; a number is appended when the name is taken.
        value: the real tensor. It must share no storage with a parameter or buffer.

    Returns:
        The placeholder, and the program with the entries added: go on with that one.
    """
    placeholders = program.placeholders
    with no_fake_mode():
        value = value.detach()
    graph = program.graph
    where = graph.inserting_after(placeholders[-1]) if placeholders else graph.inserting_before(next(iter(graph.nodes)))
    with where:
        node = graph.placeholder(name)
    node.target = node.name  # the graph made the name unique
    mode = fake_mode(program.graph_module)
    node.meta["val"] = fake = mode.from_tensor(value, static_shapes=True)
    device = _planned_device(program, value.device)
    if fake.device != device:
        with mode:
            node.meta["val"] = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=device)
    entry = Input(node.name, InputKind.CONSTANT)
    return node, dataclasses.replace(
        program, inputs=(*program.inputs, entry), state=joined(program.state, {node.name: value})
    )


def _planned_device(program: Program, device: torch.device) -> torch.device:
    """Where tensors that really lie on a device are in the program, which may be planned for another."""
    states = ((node, program.state.get(node.name)) for node in program.placeholders)
    planned = (node.meta["val"].device for node, value in states if value is not None and value.device == device)
    return next(planned, device)


def drop_unused_constants(program: Program) -> tuple[Program, list[str]]:
    """Remove CONSTANT inputs without users from a program that is being edited; return it and their names."""
    constants = {entry.name for entry in program.inputs if entry.kind is InputKind.CONSTANT}
    unused = [node for node in program.placeholders if node.name in constants and not node.users]
    names = [node.name for node in unused]
    for node in unused:
        program.graph.erase_node(node)
    dropped = set(names)
    inputs = tuple(entry for entry in program.inputs if entry.name not in dropped)
    state = only(program.state, {entry.name for entry in inputs})
    return dataclasses.replace(program, inputs=inputs, state=state), names


def forget_inplace(graph: fx.Graph) -> None:
    """Remove the in-place annotations: they were proved for the lifetimes before a rewrite, which makes some longer."""
    for node in graph.nodes:
        node.meta.pop("inplace", None)


def fake_value(
    program: Program, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """What `target(*args, **kwargs)` returns when nodes among its arguments stand for their recorded fake values."""
    values, named = fx.map_arg((tuple(args), dict(kwargs or {})), lambda node: node.meta["val"])
    with fake_mode(program.graph_module), torch.no_grad():
        return target(*values, **named)


class Builder:
    """Adds nodes before one, with the source line and in the phase of another.

    Attributes:
        before: the node that stands behind them.
    """

    def __init__(self, before: fx.Node, like: fx.Node | None = None) -> None:
        """Add before a node what is like another one, or like itself."""
        self.before = before
        self._meta = {key: value for key, value in (like or before).meta.items() if key in ("stack_trace", "phase")}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of an operator; its value is not known yet."""
        with self.before.graph.inserting_before(self.before):
            node = self.before.graph.call_function(target, args, kwargs)
        node.meta = dict(self._meta)
        return node


def show_again(graph: fx.Graph, chain: Sequence[fx.Node], copied: fx.Node) -> fx.Node:
    """What the last of a chain of views shows, of a copy of the first; made where the graph inserts nodes now.

    Args:
        graph: edited.
        chain: a value, and views each of the one before.
        copied: what has the value, in memory of its own.
    """
    shown = copied
    for before, view in itertools.pairwise(chain):
        made = graph.node_copy(view, lambda given, here=shown, there=before: here if given is there else given)  # type: ignore[misc]
        target: Any = made.target
        made.meta["val"] = target(*fx.map_arg(made.args, _value), **fx.map_arg(made.kwargs, _value))
        shown = made
    return shown


def _value(node: fx.Node) -> Any:
    return node.meta["val"]
