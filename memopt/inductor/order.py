"""A fusion policy for Inductor: kernels are fused only where that moves neither past a library call."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from torch import fx

from memopt.torch_compat.inductor_fusion import (
    BaseSchedulerNode,
    ExternKernelSchedulerNode,
    InductorChoices,
    Scheduler,
    nodes_being_lowered,
)

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
        self._order: _Order | None = None

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
        if self._order is None or self._order.scheduler is not scheduler:
            self._order = _Order(scheduler)
        return self._order.apart(node1, node2)


class _Order:
    """Where library calls stand in one scheduler's order, and in the graph's.

    Inductor puts a value that it computes element by element where it is first needed in memory: of three that stand
    together in the graph, each is scheduled before the call that reads it. Two nodes are together if they are so in
    either order.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._place: dict[fx.Node, int] = {node: index for index, node in enumerate(nodes_being_lowered())}
        calls = [node for node in scheduler.nodes if isinstance(node, ExternKernelSchedulerNode)]  # no fusion moves one
        self._scheduled = sorted(int(node.min_order) for node in calls)
        self._written = sorted(place for node in calls for place in self._places(node))

    def apart(self, *nodes: BaseSchedulerNode) -> bool:
        """Whether a library call stands between nodes in both orders."""
        scheduled = [int(order) for node in nodes for order in (node.min_order, node.max_order)]
        if not _between(self._scheduled, scheduled):
            return False
        written = [self._places(node) for node in nodes]
        return not all(written) or _between(self._written, [place for places in written for place in places])

    def _places(self, node: BaseSchedulerNode) -> list[int]:
        """Where the parts of a node stand in the graph; nothing where one is not known."""
        found = []
        for part in node.get_nodes():
            origins = () if part.node is None else part.node.get_origins()
            places = [self._place[origin] for origin in origins if origin in self._place]
            if not places:
                return []
            found.append(max(places))  # the others are computed within
        return found


def _between(calls: Sequence[int], places: Sequence[int]) -> bool:
    """Whether one of the calls, sorted, lies between the places."""
    return bisect.bisect_right(calls, min(places)) < bisect.bisect_left(calls, max(places))


def _is_added(node: BaseSchedulerNode) -> bool:
    operations = (part.node for part in node.get_nodes())
    return any(ADDED in origin.meta for made in operations if made is not None for origin in made.get_origins())
