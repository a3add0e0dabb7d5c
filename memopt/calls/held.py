"""What the modules of a model hold as attributes, down into containers and plain objects, by name; and its leaves."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memopt.memory.attributes import is_object
from memopt.memory.object_state import contents_of, refill, reset_attributes
from memopt.torch_compat import pytree
from memopt.torch_compat.modules import OF_COMPILER

# What is compared by its value.
PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), slice, range, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
_PARTS = frozenset(vars(nn.Module()))
_DEPTH, _MOST = 4, 10_000  # of containers in containers; items of one that are looked at


class Held:
    """What a model's modules hold beside parameters and buffers, to compare and to return to.

    Attributes:
        values: tensors and plain values by name: `stats['n']`, `seen[0]`, `cache.count`; of a container its length.
    """

    def __init__(self, model: nn.Module) -> None:
        """Look at it now."""
        self.values: dict[str, Any] = {}
        self._contents: list[tuple[Any, list[Any]]] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._seen: set[int] = set()
        for path, module in model.named_modules():
            attributes = vars(module)
            self._attributes.append((attributes, dict(attributes)))
            # Which parameters, buffers, modules and hooks there are is returned to as well.
            self._contents += [
                (value, contents_of(value) or []) for key, value in attributes.items() if _is_part(key, value)
            ]
            for key, value in list(attributes.items()):
                if key not in _PARTS and key not in OF_COMPILER:
                    self._look(f"{path}.{key}".lstrip("."), value, _DEPTH)

    def restore(self) -> None:
        """Return to it: the same objects, with what they held."""
        for attributes, known in self._attributes:
            reset_attributes(attributes, known)
        for container, contents in self._contents:
            refill(container, contents)

    def _look(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, (torch.Tensor, *PLAIN)):
            self.values[name] = value
            return
        if id(value) in self._seen or not depth:
            return
        self._seen.add(id(value))
        contents = contents_of(value)
        if contents is not None:
            self._contents.append((value, contents))
        if contents is not None or isinstance(value, tuple):
            self.values[f"length of {name}"] = len(value)
            for part, item in _items(value):
                self._look(f"{name}[{part}]", item, depth - 1)
        elif is_object(value):
            attributes = vars(value)
            self._attributes.append((attributes, dict(attributes)))
            for key, item in list(attributes.items()):
                self._look(f"{name}.{key}", item, depth - 1)


def _is_part(key: str, value: Any) -> bool:
    return key in _PARTS and contents_of(value) is not None


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(repr(key), item) for key, item in list(value.items())[:_MOST] if isinstance(key, PLAIN)]
    if isinstance(value, set):
        return [(repr(item), item) for item in list(value)[:_MOST] if isinstance(item, PLAIN)]
    return [(str(index), item) for index, item in enumerate(list(value)[:_MOST])]


def leaves_of(value: Any) -> Iterator[Any]:
    """All leaves of what a model returns, of dataclasses too that torch does not know."""
    for leaf in pytree.tree_leaves(value, is_leaf=dataclasses.is_dataclass):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from leaves_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            yield leaf


def structure_of(value: Any) -> str:
    """The containers that a model returns, with their classes and keys; leaves are dots."""
    if isinstance(value, dict):
        parts = [f"{key!r}: {structure_of(item)}" for key, item in value.items()]
    elif isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        parts = [structure_of(item) for item in value]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        parts = [f"{name}={structure_of(item)}" for name, item in named]
    else:
        return "."
    return f"{type(value).__name__}({', '.join(parts)})"
