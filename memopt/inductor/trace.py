"""One trace of a Dynamo graph for every way in which it is lowered.

AOTAutograd traces the joint graph, and Inductor's joint-graph passes rewrite it, each time that `compile_fx` is called.
What comes of both is the same every time, since neither knows of a partition: it is kept, and only the cut differs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from memopt.torch_compat.aot_autograd import has_joint_pass
from memopt.torch_compat.joint_graphs import joint_graphs_by
from memopt.torch_compat.operators import HigherOrderOperator
from memopt.torch_compat.tracing_context import fake_mode_here


class Trace:
    """The joint graph of one Dynamo graph, as a partitioner receives it, from one lowering to the next."""

    def __init__(self) -> None:
        """Nothing is traced yet."""
        self._kept: tuple[Any, ...] | None = None
        self._mode: Any = None
        self._learned: dict[str, Any] = {}  # what tracing adds to the metadata of the graph
        self._rewritten: fx.GraphModule | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Within: a joint graph is traced and rewritten once, whatever is lowered of it."""
        with joint_graphs_by(self._trace, self._rewrite):
            yield

    def _trace(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def trace(flat_fn: Any, *args: Any, fw_metadata: Any, **options: Any) -> Any:
            mode = fake_mode_here()
            if self._kept is not None and mode is self._mode:
                vars(fw_metadata).update(self._learned)
                return self._kept
            before = _looked_at(fw_metadata)
            found = plain(flat_fn, *args, fw_metadata=fw_metadata, **options)
            after = _looked_at(fw_metadata)
            self._kept = self._rewritten = None
            grown = any(before[name][1] != after[name][1] for name in before if before[name][0] is after[name][0])
            if mode is not None and not grown and _can_be_kept(found):
                self._learned = {
                    name: value
                    for name, (value, _) in after.items()
                    if name not in before or before[name][0] is not value
                }
                self._kept, self._mode = found, mode
            return found

        return trace

    def _rewrite(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def rewrite(module: fx.GraphModule, *args: Any, **options: Any) -> Any:
            if self._kept is None or module is not self._kept[0]:
                return plain(module, *args, **options)
            if self._rewritten is None:
                self._rewritten = plain(module, *args, **options)
            return self._rewritten

        return rewrite


def _looked_at(metadata: Any) -> dict[str, tuple[Any, int]]:
    """The fields, with the sizes of those that may grow in place."""
    sized = (list, dict, set)
    return {name: (value, len(value) if isinstance(value, sized) else 0) for name, value in vars(metadata).items()}


def _can_be_kept(found: tuple[Any, ...]) -> bool:
    """Whether lowering leaves the graph as it is: subgraphs and tensor subclasses are taken apart in place."""
    module, subclasses = found[0], found[-1]
    if subclasses is not None or has_joint_pass():
        return False
    return not any(isinstance(node.target, HigherOrderOperator) for node in module.graph.nodes)
