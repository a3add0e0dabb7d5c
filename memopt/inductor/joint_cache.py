"""Torch's cache of what AOTAutograd made of a graph, where Inductor's pipeline has memopt's partition in it.

By itself torch knows nothing of plans: what it keeps of one budget it would return for another. Here what a plan
depends on before a graph is traced is part of the key, and an entry is written only when the step is settled, be it
after many attempts. Found again, neither the joint graph is traced nor a half generated.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import autograd_cache, graph_compile
from torch._functorch._aot_autograd.aot_autograd_result import SerializedGraphModule
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor import codecache

from memopt.errors import first_line

log = logging.getLogger("memopt")

Call = Callable[[list[Any]], Any]


class AbsentError(Exception):
    """Torch's cache holds nothing for the graph."""


class JointCache:
    """One Dynamo graph's place in torch's cache.

    Attributes:
        key: torch's own, which covers the graph, its inputs, all settings, and the partition's `uuid`; empty where the
            graph cannot be cached, or was not looked for.
    """

    def __init__(self) -> None:
        """Nothing is looked for yet."""
        self.key = ""
        self._entry: Any = None  # of the latest attempt

    @contextlib.contextmanager
    def looking(self, around_backward: Callable[[Call], Call]) -> Iterator[None]:
        """Within: a graph that is lowered is loaded from the cache.

        Args:
            around_backward: put around backward as it runs.

        Raises:
            AbsentError: it is not there.
        """
        load, key_of = AOTAutogradCache.try_load, autograd_cache.autograd_cache_key

        def remembered(*args: Any, **options: Any) -> Any:
            found = key_of(*args, **options)
            self.key = found[0]
            return found

        def only_load(*args: Any, **options: Any) -> Any:
            found = load(*args, **options)
            if (found[0] if isinstance(found, tuple) else found) is None:
                raise AbsentError
            return found

        with (
            functorch_config.patch(enable_autograd_cache=True),
            patch.object(AOTAutogradCache, "try_load", only_load),
            patch.object(autograd_cache, "autograd_cache_key", remembered),
            _second_within(around_backward),
        ):
            if not autograd_cache.should_use_local_autograd_cache():
                raise AbsentError
            yield

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Within: what is made of the graph that was looked for is remembered, and nothing is read or written."""
        self._entry = None
        if not self.key:
            with functorch_config.patch(enable_autograd_cache=False):
                yield
            return

        def remember(_: str, entry: Any, remote: bool = False) -> None:
            self._entry = entry

        with (
            functorch_config.patch(enable_autograd_cache=True),
            patch.object(autograd_cache, "autograd_cache_key", lambda *_, **__: (self.key, [])),
            patch.object(AOTAutogradCache, "_lookup", lambda *_, **__: None),
            patch.object(AOTAutogradCache, "save", remember),
            patch.object(graph_compile, "serialize_graph_module", _as_it_is),
        ):
            yield

    def taken(self) -> Any:
        """What the latest attempt would write; None where nothing of it can be cached."""
        return self._entry

    def write(self, entry: Any) -> None:
        """Keep an entry under the key of the graph."""
        try:
            AOTAutogradCache.save(self.key, entry, remote=False)
        except Exception as error:  # a step that runs does not fail for what cannot be kept of it
            log.info("torch keeps nothing of the step: %s: %s", type(error).__name__, first_line(error))


def _as_it_is(half: fx.GraphModule) -> SerializedGraphModule:
    """A half for an entry; torch's own function takes the metadata of every node away, which memopt still reads."""
    meta, half.meta = half.meta, {}
    try:
        return SerializedGraphModule(half)
    finally:
        half.meta = meta


@contextlib.contextmanager
def _second_within(around: Callable[[Call], Call]) -> Iterator[None]:
    """While an entry is loaded, forward's module first and backward's next: `around` is put around the second."""
    load, seen = codecache.PyCodeCache.load_by_key_path, 0

    def loading(key: str, path: str, linemap: Any = None, attrs: Any = None, **options: Any) -> Any:
        nonlocal seen
        module = load(key, path, linemap, attrs, **options)
        if attrs is None:  # a kernel's own module
            return module
        seen += 1
        return SimpleNamespace(call=around(module.call), __file__=path) if seen == 2 else module

    with patch.object(codecache.PyCodeCache, "load_by_key_path", staticmethod(loading)):
        yield
