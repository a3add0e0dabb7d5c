"""Inputs of Dynamo's graphs: what they are to the model, and what a user calls them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from memopt.capture.joint import Origin
from memopt.graph.weights import Value, by_itself
from memopt.program import InputKind

_LOCAL = r"\bL\['(\w+)'\]"  # how Dynamo's sources write a local variable


class Known(NamedTuple):
    """A tensor of the model: its role, its qualified name, and where it is found; None if its value is not to be known.

    Of a parameter that is gathered for a call, the bytes that stay of its gradient after the graph's backward, too.
    """

    kind: InputKind
    name: str
    value: Value | None
    left_bytes: int | None = None


Names = Mapping[int, Known]  # of the model's tensors, by `id`


def origin_of(node: fx.Node, value: Any, names: Names) -> Origin:
    """What an input of Dynamo's graph is to the model.

    Args:
        node: the placeholder.
        value: what is given for it.
        names: of the model's tensors; empty where the model is not known.
    """
    if not isinstance(value, torch.Tensor):
        return Origin(InputKind.USER, None, None)
    if id(value) in names:
        kind, target, held, left = names[id(value)]
        return Origin(kind, target, held if left is None else None, left)  # what is gathered does not stay
    argument = node.meta.get("grapharg")
    source = argument.source.name if argument is not None and argument.source is not None else ""
    source = source() if callable(source) else source
    if isinstance(value, torch.nn.Parameter):
        return Origin(InputKind.PARAMETER, _qualified(source) or node.name, by_itself(value))
    if "._buffers[" in source:
        return Origin(InputKind.BUFFER, _qualified(source), by_itself(value))
    return Origin(InputKind.USER, None, None)


def called(node: fx.Node, origin: Origin) -> str:
    """What a user calls an input of Dynamo's graph."""
    if origin.target:
        return f"{origin.kind.value} {origin.target!r}"
    argument = node.meta.get("grapharg")
    source = argument.source.name if argument is not None and argument.source is not None else node.name
    source = source() if callable(source) else source
    return f"input {re.sub(_LOCAL, lambda found: found[1], source)}"


def _qualified(source: str) -> str:
    """`L['self']._modules['conv']._parameters['weight']` → `conv.weight`."""
    parts = []
    for piece in source.split("._")[1:]:
        if "['" in piece:
            parts.append(piece.split("['", 1)[1].split("']", 1)[0])
    return ".".join(parts)
