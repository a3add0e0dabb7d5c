"""Which gradients of a captured step there are, by the outputs of forward that have one themselves.

A loss may use some outputs only. AOTAutograd's backward is given zeros for the others, and returns zeros for what only
these depend on, where eager has no gradient at all: an optimizer with weight decay tells the two apart.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from memopt.capture.joint import is_tangent
from memopt.capture.reached import Reached
from memopt.graph.rewrite import ancestors
from memopt.program import InputKind, Program, is_any_view
from memopt.step.missing_tangents import Tangent
from memopt.step.own_copies import recomputes
from memopt.torch_compat.backward import input_of_gradient, role_of, shown_by_role, tangent_places


def places_of_tangents(program: Program) -> dict[str, int | None]:
    """Which output of forward each tangent of a captured training program is of; None where that is not known."""
    roles = role_of(program.graph.output_node()) or ()
    tangents = {
        node.name: role_of(node)
        for entry, node in zip(program.inputs, program.placeholders, strict=True)
        if entry.kind is InputKind.TANGENT
    }
    return tangent_places(tangents, roles[: program.forward_outputs])


def tangents_of(program: Program) -> tuple[Tangent, ...]:
    """The gradients that backward of a captured training program takes, in order; none where one is not known."""
    places, found = places_of_tangents(program), []
    for node in program.placeholders:
        if node.name in places:
            place = places[node.name]
            found.append(None if place is None else Tangent.of(place, node.meta["val"]))
    return tuple(item for item in found if item is not None) if None not in found else ()


def gradient_sources(program: Program, reached: Reached = MappingProxyType({})) -> tuple[tuple[int, ...] | None, ...]:
    """Per gradient that backward returns, the outputs of forward that it comes of, by position.

    None where a gradient may exist whatever outputs have one, or is never there.

    Args:
        program: a training program as it was captured.
        reached: per input of the graph that it was captured from, what eager has gradients from.
    """
    places = places_of_tangents(program)
    tangents = [node for node in program.placeholders if node.name in places]
    values = program.output_nodes
    gradients = values[program.forward_outputs :]
    if None in places.values():
        return (None,) * len(gradients)
    read = _read_by(program, {node: index for index, node in enumerate(tangents)})
    order = [places[node.name] for node in tangents]
    roles: Sequence[Any] = role_of(program.graph.output_node()) or (None,) * len(values)
    shown = [shown_by_role(role) for role in roles]
    found: list[tuple[int, ...] | None] = []
    for output, value, role in zip(
        program.outputs[program.forward_outputs :], gradients, roles[program.forward_outputs :], strict=True
    ):
        if value is None:
            found.append(None)
            continue
        mask = read[value]
        sources = {place for index, place in enumerate(order) if mask >> index & 1 and place is not None}
        if not sources:  # zeros that nothing is read for: of rounding, say
            sources = _outputs_of(output.target, values, order)
        in_eager = reached.get(input_of_gradient(role), ())
        sources |= {place for place in order if place is not None and shown[place] in in_eager}
        found.append(tuple(sorted(sources)) or None)
    return tuple(found)


def without_gradient(program: Program) -> tuple[int, ...]:
    """Positions of the inputs that get no gradient, of the graph that a training program was captured from."""
    roles: Sequence[Any] = role_of(program.graph.output_node()) or ()
    late = zip(program.output_nodes[program.forward_outputs :], roles[program.forward_outputs :], strict=False)
    missing = [input_of_gradient(role) for value, role in late if value is None]
    return tuple(place for place in missing if place >= 0)


def _read_by(program: Program, tangents: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Per node a bit for each tangent that it is computed from."""
    read: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        mask = 1 << tangents[node] if node in tangents else 0
        for operand in node.all_input_nodes:
            mask |= read[operand]
        read[node] = mask
    return read


@dataclasses.dataclass(frozen=True)
class SavedFor:
    """A value that forward saves, and eager's backward may do without.

    Attributes:
        place: in what forward returns.
        argument: the name of the input that it is or shows; None where it is none.
        tangents: names of the gradients that what is read of it goes with: without them it does not matter.
        recomputed: whether it is saved in place of what eager saves: something is recomputed from it, or eager itself
            recomputes it.
    """

    place: int
    argument: str | None
    tangents: tuple[str, ...]
    recomputed: bool


def saved_in_part(forward: fx.GraphModule, backward: fx.GraphModule, *, breaks: bool) -> tuple[SavedFor, ...]:
    """What forward saves for some of its outputs only, or otherwise than eager.

    Args:
        forward, backward: the two graphs of a step; what backward reads of forward goes by the same name.
        breaks: whether the model has other graphs: backward is run where none of the outputs has a gradient, too.
    """
    tangents = [node for node in backward.graph.find_nodes(op="placeholder") if is_tangent(node)]
    bits = {node: 1 << index for index, node in enumerate(tangents)}
    needed = _needed(backward.graph, bits)
    values: list[Any] = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    places = {value.name: (place, value) for place, value in enumerate(values) if isinstance(value, fx.Node)}
    shown = collections.Counter(_base(value) for value in values if isinstance(value, fx.Node))
    found = []
    for node in backward.graph.find_nodes(op="placeholder"):
        if node in bits or node.name not in places or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        place, value = places[node.name]
        base = _base(value)
        recomputed = value.meta.get("recompute") is not None or any(map(recomputes, _readers(node)))
        instead = recomputed and base.op != "placeholder" and shown[base] > 1
        if breaks or instead or needed[node] != (1 << len(tangents)) - 1:
            argument = base.name if base.op == "placeholder" else None
            of = tuple(tangent.name for tangent in tangents if needed[node] & bits[tangent])
            found.append(SavedFor(place, argument, of, recomputed))
    return tuple(found)


def _needed(graph: fx.Graph, bits: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Per node of backward a bit for each tangent without which nothing that is read of the node matters."""
    read: dict[fx.Node, int] = {}
    for node in graph.nodes:
        read[node] = bits.get(node, 0)
        for operand in node.all_input_nodes:
            read[node] |= read[operand]
    needed: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        needed[node] = 0
        for user in node.users:
            needed[node] |= read[user] or needed[user]
    return needed


def _base(node: fx.Node) -> fx.Node:
    while is_any_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads a value or a view of it."""
    found = list(node.users)
    for user in found:
        found += user.users if is_any_view(user) else ()
    return found


def _outputs_of(target: str | None, values: Sequence[fx.Node | None], places: Sequence[int | None]) -> set[int]:
    """Those outputs that forward computes from an input."""
    found = set()
    for place in places:
        value = None if place is None else values[place]
        if place is not None and value is not None and target in {node.name for node in ancestors([value])}:
            found.add(place)
    return found
