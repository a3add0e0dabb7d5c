"""A fusion policy for Inductor: kernels are fused only where that moves neither past a library call."""

from __future__ import annotations

import bisect
from typing import Any

from torch._inductor.choices import InductorChoices
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode, Scheduler

# In the meta of a node that a rewrite has put into the graph.
ADDED = "memopt_added"


class KeepOrder(InductorChoices):
    """Refuses a fusion of two nodes with a library call, a matrix product say, between them.

    Fused, the later node would run with the earlier one, or the earlier with the later: what the call reads or makes
    would be alive together with what it was planned apart from.
    """

    def __init__(self, *, added_only: bool = False) -> None:
        """Make a policy.

        Args:
            added_only: refuse only where both nodes compute something that a rewrite has put into the graph (`ADDED`):
                chunks of a loss, say, which are of no use where all of them run at once.
        """
        super().__init__()
        self._added_only = added_only
        self._calls: list[int] = []
        self._scheduler: int | None = None

    def can_fuse_horizontal(  # type: ignore[override]
        self, scheduler: Scheduler, node1: BaseSchedulerNode, node2: BaseSchedulerNode, shared_data_score: int
    ) -> bool:
        """Inductor's hook: whether two nodes that read the same data may become one kernel."""
        if self._apart(scheduler, node1, node2):
            return False
        allowed: Any = InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)
        return bool(allowed)

    def can_fuse_vertical(  # type: ignore[override]
        self, scheduler: Scheduler, node1: BaseSchedulerNode, node2: BaseSchedulerNode, shared_data_score: int
    ) -> bool:
        """Inductor's hook: whether a node and its reader may become one kernel."""
        if self._apart(scheduler, node1, node2):
            return False
        allowed: Any = InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score)
        return bool(allowed)

    def _apart(self, scheduler: Scheduler, node1: BaseSchedulerNode, node2: BaseSchedulerNode) -> bool:
        """Whether a library call stands between the two, in the order in which they were planned."""
        if self._added_only and not (_is_added(node1) and _is_added(node2)):
            return False
        early, late = sorted((int(node1.min_order), int(node2.min_order)))
        calls = self._orders(scheduler)
        return bisect.bisect_right(calls, early) < bisect.bisect_left(calls, late)

    def _orders(self, scheduler: Scheduler) -> list[int]:
        """Positions of the library calls, which no fusion changes."""
        if self._scheduler != id(scheduler):
            self._scheduler = id(scheduler)
            self._calls = sorted(
                int(node.min_order) for node in scheduler.nodes if isinstance(node, ExternKernelSchedulerNode)
            )
        return self._calls


def _is_added(node: BaseSchedulerNode) -> bool:
    operations = (part.node for part in node.get_nodes())
    return any(ADDED in origin.meta for made in operations if made is not None for origin in made.get_origins())
