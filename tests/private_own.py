"""Names with an underscore that a file takes from another one: imported, or read off an object of another's class."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.private_torch import DOCUMENTED, OTHERS, nodes_of, own_names


def borrowed(path: Path) -> Iterator[str]:
    """Each private name of memopt's that this file uses and another one has.

    Which names are torch's is for `tests.private_torch` to say; operators of graphs have underscores of their own.
    """
    own = own_names([path])
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "memopt":
            yield from (f"{node.module}.{item.name}" for item in node.names if _is_private(item.name))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own | OTHERS:
            text = ast.unparse(node)
            owner = text.rpartition(".")[0]
            if owner in ("self", "cls", "super()") or text in DOCUMENTED:
                continue  # a base class in another file shares them with its own subclasses
            if owner.split(".")[-1].strip("_").lower() not in ("aten", "prims"):
                yield text


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
