"""Attributes of torch's modules and classes, replaced for a block; where it is used is said why no setting would do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

_MISSING = object()
_lock = threading.Lock()
# Of each attribute that is replaced now: what it was before, and what the blocks that run have put there, the first
# first; with the module or class, so that its number is no other's. Threads leave their blocks in any order.
_blocks: dict[tuple[int, str], tuple[Any, Any, list[_Value]]] = {}


class _Value:
    """What one block has put there."""

    def __init__(self, value: Any) -> None:
        self.value = value


@contextlib.contextmanager
def replaced(where: Any, name: str, value: Any) -> Iterator[None]:
    """Within: `where.name` is `value`; after it, and after an error, what it was.

    Blocks may lie within one another, or begin and end in several threads in any order: the attribute is what the last
    that still runs has put there, and after the last of all what it was.

    What a class inherits, or a module makes by `__getattr__`, is found there again afterwards and not copied down.

    Raises:
        AttributeError: there is no such attribute, in this version of torch.
    """
    getattr(where, name)
    key, own = (id(where), name), _Value(value)
    with _lock:
        if key not in _blocks:
            _blocks[key] = where, vars(where).get(name, _MISSING), []
        _, before, values = _blocks[key]
        values.append(own)
        setattr(where, name, value)
    try:
        yield
    finally:
        with _lock:
            last = values[-1] is own
            values.remove(own)
            if not values:
                del _blocks[key]
            if values and last:
                setattr(where, name, values[-1].value)
            elif not values and before is _MISSING:
                delattr(where, name)
            elif not values:
                setattr(where, name, before)
