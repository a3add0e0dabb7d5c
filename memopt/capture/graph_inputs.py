"""Inputs of Dynamo's graphs: what they are to the model, and what a user calls them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from memopt.capture.joint import Origin
from memopt.program import InputKind
from memopt.torch_compat.fake_tensors import FakeTensor

_LOCAL = r"\bL\['(\w+)'\]"  # how Dynamo's sources write a local variable


class Known(NamedTuple):
    """A tensor of the model: its role, its qualified name and itself.

    Of a parameter that is gathered for a call, the bytes that stay of its gradient after the graph's backward, too.
    """

    kind: InputKind
    name: str
    tensor: torch.Tensor
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
        kind, target, real, left = names[id(value)]
        return Origin(kind, target, _known(real) if left is None else None, left)  # what is gathered does not stay
    argument = node.meta.get("grapharg")
    source = argument.source.name if argument is not None and argument.source is not None else ""
    source = source() if callable(source) else source
    if isinstance(value, torch.nn.Parameter):
        return Origin(InputKind.PARAMETER, _qualified(source) or node.name, _known(value))
    if "._buffers[" in source:
        return Origin(InputKind.BUFFER, _qualified(source), _known(value))
    return Origin(InputKind.USER, None, None)


def called(node: fx.Node, origin: Origin) -> str:
    """What a user calls an input of Dynamo's graph."""
    if origin.target:
        return f"{origin.kind.value} {origin.target!r}"
    argument = node.meta.get("grapharg")
    source = argument.source.name if argument is not None and argument.source is not None else node.name
    source = source() if callable(source) else source
    return f"input {re.sub(_LOCAL, lambda found: found[1], source)}"


def _known(value: torch.Tensor) -> torch.Tensor | None:
    """The tensor's value, unless it has none or changes to it cannot be noticed."""
    unknown = value.is_inference() or value.is_meta or isinstance(value, FakeTensor)
    return None if unknown else value.detach()


def _qualified(source: str) -> str:
    """`L['self']._modules['conv']._parameters['weight']` → `conv.weight`."""
    parts = []
    for piece in source.split("._")[1:]:
        if "['" in piece:
            parts.append(piece.split("['", 1)[1].split("']", 1)[0])
    return ".".join(parts)
