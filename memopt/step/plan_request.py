"""What an engine that makes code of its own asks of the next plan of its graph."""

from __future__ import annotations

import dataclasses

from memopt.pass_manager import Pass


@dataclasses.dataclass
class PlanRequest:
    """One engine's request; it is the engine's own, and handed to whoever plans.

    Attributes:
        search: whether a plan is searched for; else the graph runs in its own order, and recomputes nothing.
        lowering: without a search, the rewrites that reduce the smallest feasible budget to use.
        correction: bytes that code takes less than the program's own operations: the plan may take so many more.
    """

    search: bool = True
    lowering: tuple[Pass, ...] = ()
    correction: int = 0
