"""Where Inductor loads the module that it generated for a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from memopt.torch_compat.inductor_compile import modules_loaded_by

Call = Callable[[list[Any]], Sequence[Any]]
# Told what loads a graph's module, the module's path, and the attributes that it is given.
Loads = Callable[[Callable[[], ModuleType], str, Mapping[str, Any]], Any]


@contextlib.contextmanager
def loaded_by(taken: Loads) -> Iterator[None]:
    """While Inductor compiles, or finds what it compiled, the module of a graph is what `taken` returns."""

    def loading(plain: Callable[[], ModuleType], path: str, attributes: Mapping[str, Any] | None) -> Any:
        return plain() if attributes is None else taken(plain, path, attributes)  # a kernel's own module has none

    with modules_loaded_by(loading):
        yield


def stand_in(call: Call, path: str) -> SimpleNamespace:
    """What stands for a graph's module: Inductor asks it for no more."""
    return SimpleNamespace(call=call, __file__=path)
