"""Attributes of torch's modules and classes, replaced for a block; where it is used is said why no setting would do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_MISSING = object()


@contextlib.contextmanager
def replaced(where: Any, name: str, value: Any) -> Iterator[None]:
    """Within: `where.name` is `value`; after it, and after an error, what it was. Blocks may lie within one another.

    What a class inherits, or a module makes by `__getattr__`, is found there again afterwards and not copied down.

    Raises:
        AttributeError: there is no such attribute, in this version of torch.
    """
    getattr(where, name)
    before = vars(where).get(name, _MISSING)
    setattr(where, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(where, name)
        else:
            setattr(where, name, before)
