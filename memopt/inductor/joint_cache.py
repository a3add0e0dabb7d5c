"""Torch's cache of what AOTAutograd made of a graph, where Inductor's pipeline has memopt's partition in it.

By itself torch knows nothing of plans: what it keeps of one budget it would return for another. Here what a plan
depends on before a graph is traced is part of the key, and an entry is written only when the step is settled, be it
after many attempts. Found again, neither the joint graph is traced nor a half generated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any
from unittest.mock import patch

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import autograd_cache, graph_compile
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._functorch._aot_autograd.schemas import AOTAutogradCacheInfo

from memopt.errors import first_line
from memopt.inductor.generated import GeneratedCode
from memopt.inductor.loading import Loads, loaded_by

log = logging.getLogger("memopt")

# What AOTAutograd calls to make an entry of what it has compiled, and for the half in it.
_CACHE, _SERIALIZE = "_cache_autograd_info", "serialize_graph_module"


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
    def looking(self, forward: GeneratedCode, backward: GeneratedCode) -> Iterator[None]:
        """Within: a graph that is lowered is found in the cache.

        Args:
            forward, backward: take the code of its halves.

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
            loaded_by(_in_order(forward, backward)),
        ):
            if not autograd_cache.should_use_local_autograd_cache():
                raise AbsentError
            yield

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Within: what is made of the graph that was looked for is remembered; nothing is read or written."""
        self._entry = None
        with functorch_config.patch(enable_autograd_cache=False), contextlib.ExitStack() as stack:
            # Torch 2.9 makes entries in another place; a bundled one would take the code apart that is to run.
            if self.key and hasattr(graph_compile, _CACHE) and not autograd_cache.should_bundle_autograd_cache():
                stack.enter_context(patch.object(graph_compile, _CACHE, self._cached(getattr(graph_compile, _CACHE))))
            yield

    def _cached(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """What makes entries, where torch's cache is off but for that."""

        def remember(_: str, entry: Any, remote: bool = False) -> None:
            self._entry = entry

        def cached(settings: Any, *args: Any, **options: Any) -> Any:
            place = AOTAutogradCacheInfo(self.key, time.time_ns(), forward_symints=[])
            with (
                patch.object(AOTAutogradCache, "save", remember),
                patch.object(graph_compile, _SERIALIZE, _with_metadata(getattr(graph_compile, _SERIALIZE))),
            ):
                return plain(dataclasses.replace(settings, cache_info=place), *args, **options)

        return cached

    def taken(self) -> Any:
        """What the latest attempt would write; None where nothing of it can be cached."""
        return self._entry

    def write(self, entry: Any) -> None:
        """Keep an entry under the key of the graph."""
        try:
            AOTAutogradCache.save(self.key, entry, remote=False)
        except Exception as error:  # a step that runs does not fail for what cannot be kept of it
            log.info("torch keeps nothing of the step: %s: %s", type(error).__name__, first_line(error))


def _with_metadata(plain: Callable[[fx.GraphModule], Any]) -> Callable[[fx.GraphModule], Any]:
    """What serializes a half for an entry, which leaves its nodes the metadata that memopt still reads."""

    def serialized(half: fx.GraphModule) -> Any:
        meta, nodes = half.meta, [(node, node.meta) for node in half.graph.nodes]
        try:
            return plain(half)
        except Exception as error:  # only compiled autograd, which is not in use here, would ask for it
            log.info("a half is not serialized: %s: %s", type(error).__name__, first_line(error))
            return None
        finally:
            half.meta = meta
            for node, kept in nodes:
                node.meta = kept

    return serialized


def _in_order(*halves: GeneratedCode) -> Loads:
    """Has each half take its module: an entry's are loaded in this order."""
    left = list(halves)

    def loading(load: Callable[[], ModuleType], path: str, attributes: Mapping[str, Any]) -> Any:
        return left.pop(0).taken(load, path, attributes) if left else load()

    return loading
