"""How the step that was planned last stands to its budget: as planned, and as an engine's own code has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from torch import fx

from memopt.budget import Budget, BudgetError
from memopt.memory.allocator import with_slack
from memopt.memory.resident import Resident
from memopt.pass_manager import Pass
from memopt.program import Program
from memopt.step.graph_peaks import GraphPeaks, peaks_of, step_peak
from memopt.step.memory_ledger import MemoryLedger
from memopt.step.planned import Planned, fingerprint
from memopt.step.planner import StepPlan

if TYPE_CHECKING:
    from memopt.step.search import StepSearch

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Step:
    """The training step that was planned last.

    Attributes:
        keys: fingerprints of its graphs as captured.
        planned: its graphs.
        plan: peaks above what is resident, as the program's own operations take them.
        plain: the same peak without a plan.
        base: bytes of what is resident.
        limit: the budget in bytes; None without one.
        whole: bytes of which a limit that is a share is one: with what libraries were known to keep then.
        lowering: the rewrites that reduce the minimum, as a plan uses them.
        search: what found the plan, as long as that is not proved.
        known: of a step that was loaded from disk, what its graph takes as it runs, and as eager runs it; its graphs
            tell else.
        fallen: bytes by which the limit is below the one that it was planned with.
    """

    keys: tuple[str, ...]
    planned: tuple[Planned, ...]
    plan: StepPlan
    plain: int
    base: int
    limit: int | None
    whole: int = 0
    lowering: tuple[Pass, ...] = ()
    search: StepSearch | None = None
    known: tuple[GraphPeaks, GraphPeaks] | None = None
    fallen: int = 0


class BudgetState(MemoryLedger):
    """The ledger with the step that was planned last, and what an engine's code takes in its place."""

    def __init__(self, budget: Budget | None, resident: Resident) -> None:
        """Nothing is planned yet."""
        super().__init__(budget, resident)
        self.step: Step | None = None  # planned last; an engine may go back to one that was planned before
        self._emitted: dict[str, GraphPeaks] = {}  # by fingerprint: what the engine's own code takes

    def goes_back_to(self, step: Step | None) -> None:
        """What was planned before is what runs."""
        self.step = step

    @property
    def limit_bytes(self) -> int:
        """The budget of the step, in bytes; 0 without one."""
        return (self.step.limit or 0) if self.step else 0

    @property
    def feasible(self) -> bool:
        """Whether the plan of the step keeps the budget, operation by operation."""
        return self.step is None or self.step.plan.feasible

    @property
    def one_graph(self) -> bool:
        """Whether the step is a single graph, run once or in several calls, which may be planned again by itself."""
        return self.step is not None and len(set(self.step.keys)) == 1

    @property
    def tight(self) -> bool:
        """Whether the budget leaves less than half of what the step takes as it is."""
        step = self.step
        return step is not None and step.limit is not None and 2 * (self.usable(step.limit) - step.base) < step.plain

    @property
    def recomputes(self) -> bool:
        """Whether the step recomputes anything."""
        planned = self.step.planned if self.step else ()
        return any(item.choice is not None and item.choice.plan.extra_seconds > 0 for item in planned)

    def share_again(self, counted: Callable[[fx.Node], bool]) -> float:
        """The share of the step's time in which the plan recomputes what `counted` says of."""
        items = [item for item in (self.step.planned if self.step else ()) if item.choice is not None]
        again = whole = 0.0
        for item in items:
            names = [node.meta.get("recomputes", "") for node in item.program.calls if counted(node)]
            again += sum(item.costs[name].seconds for name in names if name in item.costs)
            whole += sum(cost.seconds for cost in item.costs.values())
        return again / whole if whole else 0.0

    def gain(self, more: int) -> float:
        """The share of the step's time that a plan with so many bytes more would save, by the search's own figures."""
        curve = self.step.plan.curve if self.step else ()
        chosen = next((point for point in curve if point.chosen), None)
        if chosen is None or chosen.seconds <= 0:
            return 1.0  # nothing is known
        return 1 - min(point.seconds for point in curve if point.bytes <= chosen.bytes + more) / chosen.seconds

    def excess_with(self, held: int) -> int:
        """Bytes by which a step that holds `held` bytes at some time is over what a budget leaves to tensors, or 0."""
        step = self.step
        if step is None or step.limit is None:
            return 0
        return max(0, step.base + held - self.usable(step.limit))

    def minimum_budget(self, taken: int) -> int:
        """The minimum for code whose tensors take `taken` bytes with all that is resident."""
        return with_slack(max(taken, self.optimizer_peak()), self.resident.device)

    def refused_at_most(self, plan: Callable[[], T], taken: int | None) -> T:
        """What `plan` returns; it is refused naming no more than code that is known takes, `taken` bytes if any.

        Raises:
            BudgetError: no plan keeps the budget.
        """
        try:
            return plan()
        except BudgetError as error:
            least = None if taken is None else self.minimum_budget(taken)
            if least is None or least >= error.minimum_bytes:
                raise
            refusal = BudgetError(least, error.budget_bytes, beside=error.beside)
        raise refusal

    # -- an engine's own code ------------------------------------------------------------------------------------

    def code_peaks(self) -> list[GraphPeaks]:
        """What each graph of the step takes: those without code yet as their operations take it."""
        assert self.step is not None
        return [
            self._emitted.get(key) or peaks_of(item.program, item.timeline)
            for key, item in zip(self.step.keys, self.step.planned, strict=True)
        ]

    def code_peak(self) -> int:
        """The step's peak above what is resident, in bytes."""
        return step_peak(self.code_peaks())

    def judged(self) -> tuple[int, int | None]:
        """Bytes that the code takes less than the program's own operations, and bytes by which it exceeds the budget.

        The second is negative when it does not, and None without a budget.
        """
        return self.judged_as(self.code_peak())

    def judged_as(self, peak: int) -> tuple[int, int | None]:
        """As `judged`, where the code of the step peaks at so many bytes above what is resident."""
        step = self.step
        assert step is not None
        total = max(step.base + peak, self.optimizer_peak())
        return step.plan.peak_bytes - peak, None if step.limit is None else total - self.usable(step.limit)

    def unused(self) -> int:
        """Bytes that the code of the step leaves of what a budget leaves to tensors."""
        excess = None if self.step is None else self.judged()[1]
        return max(0, -(excess or 0))

    def coded(self) -> bool:
        """Whether what the code of every graph of the step takes is known."""
        return self.step is not None and all(key in self._emitted for key in self.step.keys)

    def has_code(self) -> bool:
        """Whether what the code of some graph of the step takes is known."""
        return self.step is not None and any(key in self._emitted for key in self.step.keys)

    def forget_code(self, keys: Iterable[str] | None = None) -> None:
        """Forget what the code of these graphs takes; of all graphs of the step, where none are named."""
        for key in (self.step.keys if self.step else ()) if keys is None else keys:
            self._emitted.pop(key, None)

    def withdraw(self, program: Program | None) -> None:
        """Forget what the code of this graph takes: it runs as a program after all."""
        self.forget_code([] if program is None else [fingerprint(program)])
