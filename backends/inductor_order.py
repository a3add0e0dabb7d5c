"""A fusion policy for Inductor: kernels are fused side by side only where that moves neither past a library call."""

from __future__ import annotations

import bisect
from typing import Any

from torch._inductor.choices import InductorChoices
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode, Scheduler


class KeepOrder(InductorChoices):
    """Refuses a horizontal fusion of two nodes with a library call, a matrix product say, between them.

    Fused, the later node would run with the earlier one: what the call reads or makes would be alive together with
    what it was planned apart from. Fusions of a producer with its reader are left to Inductor.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[int] = []
        self._scheduler: int | None = None

    def can_fuse_horizontal(  # type: ignore[override]
        self, scheduler: Scheduler, node1: BaseSchedulerNode, node2: BaseSchedulerNode, shared_data_score: int
    ) -> bool:
        """Inductor's hook: whether two nodes that read the same data may become one kernel."""
        early, late = sorted((int(node1.min_order), int(node2.min_order)))
        calls = self._orders(scheduler)
        if bisect.bisect_right(calls, early) < bisect.bisect_left(calls, late):
            return False
        allowed: Any = InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)
        return bool(allowed)

    def _orders(self, scheduler: Scheduler) -> list[int]:
        """Positions of the library calls, which no fusion changes."""
        if self._scheduler != id(scheduler):
            self._scheduler = id(scheduler)
            self._calls = sorted(
                int(node.min_order) for node in scheduler.nodes if isinstance(node, ExternKernelSchedulerNode)
            )
        return self._calls
