"""The plan of one step: what its graphs were planned for last, and with what another attempt at it is made."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

from memopt.budget import Budget
from memopt.compilation.kept_search import KeptSearch
from memopt.compilation.known_plans import Known, KnownPlans
from memopt.cuda_graphs.pool import GraphPool
from memopt.evidence import Verification
from memopt.memory.cost.table import CostTable
from memopt.memory.resident import Resident
from memopt.pass_manager import Pass
from memopt.program import Program
from memopt.report.record import Report
from memopt.step.budget_state import Step
from memopt.step.exact_trial import tried_as_is
from memopt.step.graph_peaks import held_beside
from memopt.step.graphs import StepGraphs
from memopt.step.planned import Planned
from memopt.step.rewriting import Rewriting
from memopt.step.search import StepSearch
from memopt.step.shared import SharedStep
from memopt.step.stages import Stages


class PlannedStep(SharedStep):
    """A step whose graphs are planned, and planned anew where an attempt has shown that another plan is needed.

    Attributes:
        rewriting: the passes that rewrite its graphs.
        table: what operators cost.
        verify: how the work of passes is checked.
        plan_seconds: how long one search may take.
        known_plans: what its graphs were planned for.
        kept_search: the search that was made last.
        exact: whether what runs is the program itself, so that its timeline is the peak.
        graph_pool: where training steps may be captured; None where they may not.
    """

    def __init__(
        self, budget: Budget | None, resident: Resident, rewriting: Rewriting, table: CostTable, verify: Verification
    ) -> None:
        """Nothing is planned yet."""
        super().__init__(budget, resident)
        self.rewriting, self.table, self.verify = rewriting, table, verify
        self.plan_seconds = 10.0
        self.known_plans = KnownPlans()
        self.kept_search = KeptSearch()
        self.exact = False
        self.graph_pool: GraphPool | None = None

    def costs_by(self, table: CostTable) -> None:
        """Operators cost what this table says from now on."""
        self.table = table

    def stands(self, step: Step, *, searched: bool) -> None:
        """Lower the step's graphs by this plan from now on; where it was searched for, it is kept."""
        if searched:
            self.known_plans.keep(map(self.known, step.keys), step.planned)
        if self.exact:
            self.forget_search()

    def one_call(self) -> bool:
        """As of a step of one call; what was planned is forgotten where it was planned together with others."""
        before = super().one_call()
        if before:
            self.forget_step()
        return before

    def forget_step(self) -> None:
        """Plan all anew: what a step takes, or is planned for, is something else now."""
        self.known_plans.clear()
        self.step = None

    def allows_no_more(self) -> bool:
        """As of a step; it is planned anew, with all that there is for plans."""
        allowed = super().allows_no_more()
        if allowed:
            self.capture_reserve.want()
            self.rewriting.arrange()
            self.forget_plan()
        return allowed

    def aim_no_more(self) -> bool:
        """Plan without a limit again, where that was aimed at and cannot be kept; whether it was."""
        aimed = self.soft
        if aimed:
            self.budget, self.soft = None, False
            self.forget_plan()
        return aimed

    def reserves_for_capture(self, captured: Sequence[Planned], limit: int | None) -> None:
        """Leave some of the budget for CUDA graphs of the step, where one may be had.

        In a step of several graphs nothing is tried: what is sent of gradients is left a place of its own, as what is
        free behind backward lies in pieces, and the allocator at its limit hands back all of its cache for one block.
        """
        if limit is not None and len(captured) > 1 and not self.exact and self.device.type == "cuda":
            self.capture_reserve.leave_in_one(self.resident.sent_in_blocks)
        elif limit is None or len(captured) > 1 or self.exact or self.graph_pool is None:
            self.capture_reserve.restore()
        else:
            self.capture_reserve.leave(captured[0].costs.values(), limit, self.resident.inputs)

    def plans_anew(self) -> bool:
        """Whether the budget is too short to leave something aside: all of it is planned with then."""
        anew = self.capture_reserve.give_up()
        if anew:
            self.forget_plan()
        return anew

    @contextlib.contextmanager
    def operator_by_operator(self) -> Iterator[None]:
        """Within: what is planned is what runs, whatever the engine would make of it."""
        before, self.exact = self.exact, True
        try:
            yield
        finally:
            self.exact = before

    def lowerings(self) -> list[tuple[Pass, ...]]:
        """Sets of rewrites for `lowering` of the step that was seen last, by its time; none slower than a plan is."""
        step = self.step
        limit = None if step is None else step.limit
        return self.kept_search.lowerings(None if step is None or limit is None else self.usable(limit) - step.base)

    def forget_plan(self) -> None:
        """Plan the step that was planned last anew when its graphs are seen again."""
        self.known_plans.forget(map(self.known, self.step.keys if self.step else ()))

    def may_leave(self, graph_break: bool) -> bool:
        """Whether an engine may try its own partition first: a step of one graph, or no budget to be shared."""
        return self.budget is None or not (graph_break or self.known_plans)

    def tighten(self, size: int) -> tuple[int, Report | None, Step | None, list[str]]:
        """Plan for so many bytes less from now on; return what `loosen` takes."""
        before = self.margin, self.report, self.step, list(self.notes)
        self.margin += size
        self.forget_plan()
        return before

    def loosen(self, before: tuple[int, Report | None, Step | None, list[str]]) -> None:
        """Take back what `tighten` did, with the plan of that time on record, and what was said of it."""
        self.margin, self.report, self.step, self.notes[:] = before

    def search_of(self, keys: tuple[str, ...], programs: Sequence[Program]) -> StepSearch:
        """The search for these graphs: what is kept of them between two attempts to plan them."""
        stages, made = self.stages(), self.rewriting.kept

        def search() -> StepSearch:
            graphs = StepGraphs(
                programs, stages, verify=self.verify, table=self.table, available=self.available, kept=made
            )
            attempt = functools.partial(tried_as_is, self)
            return StepSearch(graphs, attempt=attempt, seconds=self.plan_seconds)

        # Nothing is fused in what runs operator by operator; its curves count what is held beside the graphs.
        return self.kept_search.of((f"{self.exact} {self.rewriting.arranges} {held_beside()}", *keys), search)

    def forget_search(self) -> None:
        """Let go of the search: the step is lowered, and what was found is in its schedules."""
        self.kept_search.forget()
        self.rewriting.forget()

    def known(self, key: str) -> Known:
        """What a graph's plan goes by: its fingerprint, and whether it runs operator by operator, or as code."""
        return self.exact, key

    def stages(self) -> Stages:
        """The passes of the step, as it is planned now: fused, or operator by operator."""
        return self.rewriting.stages(self.exact)
