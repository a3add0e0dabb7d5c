"""How nodes of a program that runs in chunks say which chunk they belong to."""

from __future__ import annotations

import dataclasses

from torch import fx

_KEY = "chunk"


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A node's place in a stretch that runs in chunks.

    Attributes:
        stretch: a name that the nodes of one stretch share.
        index: which chunk, from 0; None for what puts the chunks' results together.
    """

    stretch: str
    index: int | None


def mark(node: fx.Node, chunk: Chunk) -> None:
    """Note the node's place; it is kept by copies of the program."""
    node.meta[_KEY] = chunk


def chunk_of(node: fx.Node) -> Chunk | None:
    """The node's place; None outside of stretches."""
    found = node.meta.get(_KEY)
    return found if isinstance(found, Chunk) else None
