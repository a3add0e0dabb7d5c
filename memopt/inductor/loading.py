"""Where Inductor loads the module that it generated for a half."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch._inductor import codecache

# Inductor loads every module that it generated under this name, those of kernels too.
_LOADER = "load_by_key_path"

Call = Callable[[list[Any]], Sequence[Any]]
# Told what loads a half's module, the module's path, and the attributes that it is given.
Loads = Callable[[Callable[[], ModuleType], str, Mapping[str, Any]], Any]


@contextlib.contextmanager
def loaded_by(half: Loads) -> Iterator[None]:
    """While Inductor compiles, or finds what it compiled, the module of a half is what `half` returns."""
    load = getattr(codecache.PyCodeCache, _LOADER)

    def loading(key: str, path: str, linemap: Any = None, attrs: Any = None, **options: Any) -> Any:
        def plain() -> ModuleType:
            module: ModuleType = load(key, path, linemap, attrs, **options)
            return module

        return plain() if attrs is None else half(plain, path, attrs)  # a kernel's own module has none

    with patch.object(codecache.PyCodeCache, _LOADER, staticmethod(loading)):
        yield


def stand_in(call: Call, path: str) -> SimpleNamespace:
    """What stands for a half's module: Inductor asks it for no more."""
    return SimpleNamespace(call=call, __file__=path)
