"""Which gradients of a captured step there are, by the outputs of forward that have one themselves.

A loss may use some outputs only. AOTAutograd's backward is given zeros for the others, and returns zeros for what only
these depend on, where eager has no gradient at all: an optimizer with weight decay tells the two apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from memopt.program import InputKind, Program
from memopt.rewrite import ancestors
from memopt.torch_compat.backward import role_of, tangent_places


def gradient_sources(program: Program) -> tuple[tuple[int, ...] | None, ...]:
    """Per gradient that backward returns, the outputs of forward that it comes of, by position.

    None where a gradient may exist whatever outputs have one, or is never there.

    Args:
        program: a training program as it was captured.
    """
    roles = role_of(program.graph.output_node()) or ()
    tangents = {
        node: role_of(node)
        for entry, node in zip(program.inputs, program.placeholders, strict=True)
        if entry.kind is InputKind.TANGENT
    }
    places = tangent_places({node.name: role for node, role in tangents.items()}, roles[: program.forward_outputs])
    values = program.output_nodes
    gradients = values[program.forward_outputs :]
    if None in places.values():
        return (None,) * len(gradients)
    read = _read_by(program, {node: index for index, node in enumerate(tangents)})
    order = [places[node.name] for node in tangents]
    found: list[tuple[int, ...] | None] = []
    for output, value in zip(program.outputs[program.forward_outputs :], gradients, strict=True):
        if value is None:
            found.append(None)
            continue
        mask = read[value]
        sources = {place for index, place in enumerate(order) if mask >> index & 1 and place is not None}
        if not sources:  # zeros that nothing is read for: of rounding, say
            sources = _outputs_of(output.target, values, order)
        found.append(tuple(sorted(sources)) or None)
    return tuple(found)


def _read_by(program: Program, tangents: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Per node a bit for each tangent that it is computed from."""
    read: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        mask = 1 << tangents[node] if node in tangents else 0
        for operand in node.all_input_nodes:
            mask |= read[operand]
        read[node] = mask
    return read


def _outputs_of(target: str | None, values: Sequence[fx.Node | None], places: Sequence[int | None]) -> set[int]:
    """Those outputs that forward computes from an input."""
    found = set()
    for place in places:
        value = None if place is None else values[place]
        if place is not None and value is not None and target in {node.name for node in ancestors([value])}:
            found.add(place)
    return found
