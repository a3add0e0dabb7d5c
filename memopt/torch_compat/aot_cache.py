"""AOTAutograd's cache of what it made of joint graphs: looked in, filled and written by who knows what is in force.

Torch has no calls for that, and its own settings know of no plan. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch._functorch import config
from torch._functorch._aot_autograd import autograd_cache, graph_compile
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._functorch._aot_autograd.schemas import AOTAutogradCacheInfo

from memopt.torch_compat.patched import replaced

# What AOTAutograd calls to make an entry of what it has compiled, and for the graph in it.
_CACHE, _SERIALIZE = "_cache_autograd_info", "serialize_graph_module"

Serialize = Callable[[fx.GraphModule], Any]


class AbsentError(Exception):
    """Torch's cache holds nothing for the graph."""


@contextlib.contextmanager
def only_found(say: Callable[[str], None]) -> Iterator[None]:
    """Within: a graph that is lowered comes from the cache.

    Args:
        say: is called with the graph's key, whether or not the cache has it.

    Raises:
        AbsentError: it is not there, or the cache is off.
    """
    load, key_of = AOTAutogradCache.try_load, autograd_cache.autograd_cache_key

    def remembered(*args: Any, **options: Any) -> Any:
        found = key_of(*args, **options)
        say(found[0])
        return found

    def only_load(*args: Any, **options: Any) -> Any:
        found = load(*args, **options)
        if (found[0] if isinstance(found, tuple) else found) is None:
            raise AbsentError
        return found

    with (
        config.patch(enable_autograd_cache=True),
        replaced(AOTAutogradCache, "try_load", only_load),
        replaced(autograd_cache, "autograd_cache_key", remembered),
    ):
        if not autograd_cache.should_use_local_autograd_cache():
            raise AbsentError
        yield


@contextlib.contextmanager
def entries_to(key: str, keep: Callable[[Any], None], serializing: Callable[[Serialize], Serialize]) -> Iterator[None]:
    """Within: nothing is read from the cache or written to it; the entry of a graph that is lowered is kept elsewhere.

    Args:
        key: the graph's; empty where it has none: no entry is made then.
        keep: takes the entry.
        serializing: makes of what serializes a graph what does so instead.
    """
    with config.patch(enable_autograd_cache=False), contextlib.ExitStack() as stack:
        # Torch 2.9 makes entries in another place; a bundled one would take the code apart that is to run.
        if key and hasattr(graph_compile, _CACHE) and not autograd_cache.should_bundle_autograd_cache():
            plain = getattr(graph_compile, _CACHE)
            stack.enter_context(replaced(graph_compile, _CACHE, _cached(plain, key, keep, serializing)))
        yield


def write(key: str, entry: Any, *, alone: bool = False) -> None:
    """Write an entry to the cache on disk, under a key; `alone`: in place of all that is there under it.

    Of a graph with symbols there may be several, each for the sizes at which its guards hold.
    """
    if alone:
        shutil.rmtree(AOTAutogradCache._get_tmp_dir_for_key(key), ignore_errors=True)
    AOTAutogradCache.save(key, entry, remote=False)


def _cached(
    plain: Callable[..., Any], key: str, keep: Callable[[Any], None], serializing: Callable[[Serialize], Serialize]
) -> Callable[..., Any]:
    """What makes entries, where torch's cache is off but for that."""

    def save(_: str, entry: Any, remote: bool = False) -> None:
        keep(entry)

    def cached(settings: Any, *args: Any, **options: Any) -> Any:
        flat: Any = args[0] if args else options.get("flat_args", [])
        symbols = AOTAutogradCache._filter_backed_symints(flat)  # the entry is for sizes at which their guards hold
        place = AOTAutogradCacheInfo(key, time.time_ns(), forward_symints=symbols)
        with (
            replaced(AOTAutogradCache, "save", save),
            replaced(graph_compile, _SERIALIZE, serializing(getattr(graph_compile, _SERIALIZE))),
        ):
            return plain(dataclasses.replace(settings, cache_info=place), *args, **options)

    return cached
