"""Torch's cache of what AOTAutograd made of a graph, where Inductor's pipeline has memopt's partition in it.

By itself torch knows nothing of plans: what it keeps of one budget it would return for another. Here what a plan
depends on before a graph is traced is part of the key, and an entry is written only when the step is settled, be it
after many attempts. Loaded, neither the joint graph is traced nor a graph generated.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import fx

from memopt.errors import first_line
from memopt.inductor.generated import GeneratedCode
from memopt.inductor.loading import Loads, loaded_by
from memopt.torch_compat import aot_cache
from memopt.torch_compat.aot_cache import AbsentError as AbsentError

log = logging.getLogger("memopt")


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
            forward, backward: take the code of its two graphs.

        Raises:
            AbsentError: it is not there.
        """
        with aot_cache.only_found(self._remember), loaded_by(_in_order(forward, backward)):
            yield

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Within: what is made of the graph that was looked for is remembered; nothing is read or written."""
        self._entry = None
        with aot_cache.entries_to(self.key, self._take, _with_metadata):
            yield

    def _remember(self, key: str) -> None:
        self.key = key

    def _take(self, entry: Any) -> None:
        self._entry = entry

    def latest_entry(self) -> Any:
        """What the latest attempt would write; None where nothing of it can be cached."""
        return self._entry

    def write(self, entry: Any, *, alone: bool = False) -> None:
        """Keep an entry under the key of the graph; `alone`: in place of all that is there."""
        try:
            aot_cache.write(self.key, entry, alone=alone)
        except Exception as error:  # a step that runs does not fail for what cannot be kept of it
            log.info("torch keeps nothing of the step: %s: %s", type(error).__name__, first_line(error))


def _with_metadata(plain: Callable[[fx.GraphModule], Any]) -> Callable[[fx.GraphModule], Any]:
    """What serializes a graph for an entry, which leaves its nodes the metadata that memopt still reads."""

    def serialized(module: fx.GraphModule) -> Any:
        meta, nodes = module.meta, [(node, node.meta) for node in module.graph.nodes]
        try:
            return plain(module)
        except Exception as error:  # only compiled autograd, which is not in use here, would ask for it
            log.info("a graph is not serialized: %s: %s", type(error).__name__, first_line(error))
            return None
        finally:
            module.meta = meta
            for node, kept in nodes:
                node.meta = kept

    return serialized


def _in_order(*graphs: GeneratedCode) -> Loads:
    """Has each graph take its module: an entry's are loaded in this order."""
    left = list(graphs)

    def loading(load: Callable[[], ModuleType], path: str, attributes: Mapping[str, Any]) -> Any:
        return left.pop(0).defer(load, path, attributes) if left else load()

    return loading
