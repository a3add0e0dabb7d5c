"""One model's compilation: what is resident, which passes run, what is planned, and the report of it all."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from memopt.budget import Budget, BudgetError
from memopt.capture.dynamo import Watched
from memopt.capture.graph_inputs import Names
from memopt.capture.outside import Outside
from memopt.common.phases import phase
from memopt.common.progress import planning
from memopt.compilation.freeze import fold_in_place
from memopt.compilation.known_plans import Known, KnownPlans
from memopt.compilation.layout import settle
from memopt.compilation.plan_together import plan_together
from memopt.engine import Engine
from memopt.evidence import Verification
from memopt.memory.allocator import count_library_bytes, library_bytes
from memopt.memory.cost.table import CostTable
from memopt.memory.resident import Resident
from memopt.memory.timeline import timeline
from memopt.pass_manager import Pass
from memopt.program import Program
from memopt.recording.pool import Pool
from memopt.recording.room import set_aside
from memopt.report.build import build_report, put_on_record
from memopt.report.record import Report
from memopt.step.by_loss_alone import ByLossAlone
from memopt.step.carry import Sizes
from memopt.step.found import Found
from memopt.step.graph_peaks import GraphPeaks
from memopt.step.graphs import StepGraphs
from memopt.step.hooked import EarlyGradients
from memopt.step.inference import Inferred, plan_inference
from memopt.step.planned import Planned, fingerprint, measured_peak, predicted_peak
from memopt.step.reference import Reference
from memopt.step.rewriting import Rewriting
from memopt.step.search import StepSearch
from memopt.step.shared import SharedStep
from memopt.step.stages import Stages
from memopt.step.standing import Step
from memopt.step.trial import tried
from memopt.torch_compat.changing_numbers import ChangingNumbers

log = logging.getLogger("memopt")


class WholeStepNeeded(Exception):
    """A graph break: the budget is shared among several graphs, so all must be seen before the first is planned."""


class Session(SharedStep):
    """Receives the programs of one model from the front door, rewrites and plans them, and keeps the report."""

    def __init__(
        self,
        *,
        budget: Budget | None,
        backend: Engine,
        passes: Sequence[Pass] | None,
        verify: Verification,
        names: Callable[[], Names],
        resident: Resident,
        table: CostTable,
        model_name: str = "",
        plan_seconds: float = 10.0,
        sizes: Sizes | None = None,
        reference: Reference | None = None,
        numbers: ChangingNumbers | None = None,
        frozen: bool = False,
        early: EarlyGradients | None = None,
    ) -> None:
        super().__init__(budget, resident)
        self.passes, self.verify = passes, verify
        self._engine, self._names = backend, names
        self.table = table
        self.model_name, self.plan_seconds = model_name, plan_seconds
        self.early = early  # whose gradients are handed over within backward
        self.outside = Outside()  # of captured graphs: what runs there
        self.collecting: list[Program] | None = None
        self.whole_step = False  # whether a graph break may be answered by collecting all graphs first
        self.foreseen = False  # whether graphs were collected, and none but those may come
        self.rehearsing = False  # whether graphs are collected as planned, for the code that they become
        self._known_plans = KnownPlans()
        self._search_kept: tuple[tuple[str, ...], StepSearch] | None = None  # with the fingerprints of its graphs
        self.rewriting = Rewriting(passes, backend, table)
        # Set by an engine that runs its own code: whether to search for a plan, and bytes that its code takes less
        # than the program's own operations would.
        self.search, self.correction = True, 0
        self.proving = True  # whether a plan is proved and put on record at once; else `conclude` is called in the end
        self.lowering: tuple[Pass, ...] = ()  # without a search, the rewrites that lower the floor to use
        self.sizes = Sizes() if sizes is None else sizes
        self.reference = Reference() if reference is None else reference
        self.numbers = ChangingNumbers(model_name) if numbers is None else numbers
        self.beyond: int | None = None  # bytes that a step was seen to make the allocator hold
        # Parameters that may be laid out anew, and which outputs were contiguous before that (`compilation.layout`).
        self.movable: frozenset[str] = frozenset()
        self.contiguous: tuple[bool, ...] = ()
        self.functions: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._laid_out: set[str] = set()  # fingerprints of graphs whose weights lie as they should
        self.inferred = Inferred()
        self.frozen = frozen  # whether batch norms may be folded into the model's own weights
        # Whether what runs is the program itself, so that its timeline is the peak.
        self.exact = backend.exact
        self.recordings: Pool | None = None  # where training steps may be recorded
        self.leaves_room = True  # whether something is left of the budget for that: not where it is short
        self.plans_sizes, self.size_plans = False, 0  # whether a plan cuts code for many sizes, and how often one did
        self.not_recalled: set[str] = set()  # keys of graphs whose code of an earlier process is not enough
        self.code_fails = False  # whether memory ran out in a step of the engine's own code that should keep the budget
        self.by_loss_alone = ByLossAlone(model_name, "" if budget is None else budget.text)
        self._waited = False  # whether a fraction was of more, as other models were not called yet
        self.naming = False  # whether the budget is a least that is to be named, and is tried

    # -- the front door's protocol -------------------------------------------------------------------------------

    @property
    def dry(self) -> bool:
        """Whether graphs are only collected: nothing needs to be compiled."""
        return self.collecting is not None

    @contextlib.contextmanager
    def collects(self, names: Names) -> Iterator[list[Program]]:
        """Within: graphs are only collected, of a model whose tensors have these names; gives the list of them."""
        before, self._names = self._names, lambda: names
        collected: list[Program] = []
        self.collecting = collected
        try:
            yield collected
        finally:
            self.collecting = self.ledger = None
            self._names = before

    def names(self) -> Names:
        """Roles and qualified names of the model's tensors, by `id`."""
        return self._names()

    def engine(self) -> Engine:
        """The backend that runs the programs."""
        return self._engine

    def see_whole_step(self) -> None:
        """A graph without gradients comes, and others after it.

        Raises:
            WholeStepNeeded: it is part of a step of training; nothing of that is to run before all of it is planned.
        """
        if self.collecting is None and self.search and self.trains and self.whole_step:
            raise WholeStepNeeded

    def see_whole_step_of_training(self) -> None:
        """A graph with gradients comes, and others after it: said before it is lowered, which would be in vain.

        Raises:
            WholeStepNeeded: nothing of the step is planned yet, and it is certain that all of it will be asked for.
        """
        certain = self.budget is not None or self._engine.exact  # an engine's own partition may do without, else
        if certain and self.collecting is None and self.search and self.whole_step and not self._known_plans:
            raise WholeStepNeeded

    def may_lack(self, program: Program, graph_break: bool) -> bool:
        """Whether a step of a joint program may need its gradients handed over as they come, to keep the budget.

        Those of one of several graphs may wait for another graph's of the same parameter. A step that hands gradients
        over is not recorded: where it may be, the answer is of what it takes as it is.
        """
        if graph_break or self.foreseen or self.broken or self.collecting is not None:
            return False
        limit = None if self.exact or self.recordings is None else self.limit(0)
        return limit is None or self.resident.total + timeline(program).peak_bytes > self.usable(limit)

    def inference(self, program: Program) -> Program:
        """Rewrite an inference program; raise BudgetError when its peak is over the budget."""
        if self.collecting is not None:
            self.collecting.append(program)
            return program
        key = fingerprint(program)  # known weights with other values: kernels are not timed again for them
        program = settle(program, frozenset() if key in self._laid_out else self.movable, self.contiguous)
        self._laid_out.add(key)
        folded = fold_in_place(program) if self.frozen else []
        if folded:
            self.note(f"frozen by consent: {len(folded)} batch norms were folded into the model's own weights")
        # An engine that measures its own runs is held to them, not to the timeline of other kernels.
        with planning(self.model_name):
            return plan_inference(self, program, settled=not self._engine.measures).program

    def training(self, program: Program, graph_break: bool) -> Program:
        """Rewrite and plan a joint program.

        Raises:
            WholeStepNeeded: there are more graphs to come, and the caller can show all of them; or it has shown others.
            BudgetError: no plan keeps the budget.
        """
        key = fingerprint(program)
        if self.eager is not None:
            self._eager[key] = self.eager
        known = self._known(key)
        if self.collecting is not None:
            self.collecting.append(program)
            return self._known_plans.replayed(known, program, self._stages()) if self.rehearsing else program
        if self.search and known in self._known_plans:
            last = self.step.planned[0] if self.step is not None and self.one_graph else None
            if last is not None and last.source is program and last.choice is not None:
                return last.program  # planned a moment ago, and not replaced since
            return self._known_plans.replayed(known, program, self._stages())
        another = bool(self._known_plans) and not self.one_graph  # one of several graphs, at another size
        strange = self.foreseen and self.step is not None and key not in self.step.keys
        if self.search and (strange or (self.whole_step and (graph_break or another))):
            raise WholeStepNeeded
        planned = self._planned_alone(program)
        if planned.source is program:
            return planned.program
        # Planned for an equal graph that was captured before: a graph is lowered by the capture that made it.
        schedule = planned.choice.plan.schedule if planned.choice else None
        return self._known_plans.replayed_by(known, program, self._stages(), schedule)

    # -- planning ------------------------------------------------------------------------------------------------

    def _planned_alone(self, program: Program) -> Planned:
        """The plan of a graph that is all of its step; made anew in place where less may be allowed for a loss.

        Raises:
            BudgetError: no plan keeps the budget; the first refusal, whose minimum is with all that is allowed for.
        """
        refused: BudgetError | None = None
        while True:
            try:
                return self.plan_training([program], settled=self.exact)[0]
            except BudgetError as error:
                refused = refused or error
            if not self.allows_no_more():
                raise refused

    def plan_training(self, programs: Sequence[Program], *, settled: bool = True) -> list[Planned]:
        """Plan all graphs of one call, together with those of the other calls of its step where there are several.

        Args:
            programs: the graphs as captured.
            settled: as `plan_together`.

        Raises:
            BudgetError: no plan keeps the budget; `minimum_bytes` is the least that one was found for.
        """
        self.expect_known_calls(programs)
        self.expects_loss(programs)
        every, first = self._with_other_calls(programs)
        with self.around_graphs():
            return plan_together(self, every, settled=settled)[first : first + len(programs)]

    def plans(self, step: Step, stages: Stages, measured: int | None) -> None:
        """Put a plan of the step on record, whether it keeps the budget or not.

        Args:
            step: as planned.
            stages: that the plan was made with.
            measured: the most bytes that a trial of it took above what is resident; None where there was none.
        """
        self._known_plans.made_with(map(self._known, step.keys), stages, step.lowering)
        self.note_failures(step.planned)
        self.step = step
        if self.proving:
            self._report(step.plan.peak_bytes, step.plan.minimum_bytes, measured)

    def stands(self, step: Step) -> None:
        """Lower the step's graphs by this plan from now on."""
        if self.search:
            self._known_plans.keep(map(self._known, step.keys), step.planned)
        if self.exact:
            self.forget_search()

    def sees_step(self, keys: tuple[str, ...], captured: Sequence[Planned], base: int, plain: int) -> int:
        """The bytes that the step of these graphs takes as eager runs it, which fractions are of."""
        own = min(plain, self._eager_peak(keys, plain))
        whole, step, calls = self._of_the_step(keys, captured, base, own)
        whole = max(whole, self.optimizer_peak()) if self.trains else whole
        self.reference.trains(whole, step, calls)
        return whole

    def one_call(self) -> bool:
        """As of a step of one call; what was planned is forgotten where it was planned together with others."""
        before = super().one_call()
        if before:
            self._forget_step()
        return before

    def plans_for_less(self, refused: BudgetError) -> None:
        """Plan what was refused anew: a call by itself, or for the loss alone.

        Raises:
            BudgetError: there is no less to plan for.
        """
        if self.one_call() or self._waits_for_others(refused):
            return
        may = not self.broken and self._may_go_by_loss_alone()
        if not may or not self.by_loss_alone.refused(refused, lets_go=self._engine.frees_outputs):
            raise self.by_loss_alone.last(refused)
        self._go_by_loss_alone()

    def _waits_for_others(self, refused: BudgetError) -> bool:
        """Whether what was refused is let do, as the fraction is of a step with models that were not called yet."""
        fraction = None if self.budget is None else self.budget.fraction
        if fraction is None or self.soft or self._waited or not self.waiting():
            return False
        self._waited = True
        self.reference.at_least(math.ceil(refused.minimum_bytes / fraction) + 1)
        self._forget_step()
        return True

    def plans_for_loss_alone(self, graph_module: fx.GraphModule, inputs: Sequence[Any], *, others: bool) -> bool:
        """Whether less is planned for: now, or in an earlier run of the script.

        Args:
            graph_module: a graph of Dynamo's that returns a loss.
            inputs: of it.
            others: whether something beside the loss has a gradient, too.
        """
        if self.budget is None:
            return False
        self.by_loss_alone.sees(graph_module, inputs, others=others)
        if self._may_go_by_loss_alone() and self.by_loss_alone.remembers():
            self._go_by_loss_alone()
        return any(self.by_loss_alone.stage)

    def raise_if_hopeless(self, least: int) -> None:
        """Have a step that no code can keep the budget with planned for gradients of the loss alone, where it may be.

        Args:
            least: bytes that any code of the plan that was made last takes above what is resident.

        Raises:
            BudgetError: that takes more, and the step is planned for less then (`plans_for_less`).
        """
        step = self.step
        may = not self.broken and self.by_loss_alone.has_fewer_gradients and self._may_go_by_loss_alone()
        if may and step is not None and not self.feasible and self.excess_with(least):
            raise BudgetError(self.least_budget(step.base + least), self.limit_bytes, beside=self.beside)

    def _may_go_by_loss_alone(self) -> bool:
        """Not where the user has all gradients compared, or calls share a step."""
        return self.budget is not None and self.verify != "full" and not (self.soft or self.calls > 1 or self.earlier)

    def _go_by_loss_alone(self) -> None:
        self._forget_step()
        for note in self.by_loss_alone.notes:
            self.note(note)

    def _forget_step(self) -> None:
        self._known_plans.clear()
        self.step = None

    def aim_at_eager(self) -> None:
        """Without a budget, aim at eager's own peak from now on: the user's checkpoints lower that."""
        if self.budget is None:
            self.budget, self.soft = Budget(None, 1.0, "the model's own peak"), True

    def allows_no_more(self) -> bool:
        """As of a step; it is planned anew, with all that there is for plans."""
        allowed = super().allows_no_more()
        if allowed:
            self.leaves_room = self.rewriting.arranges = True
            self.forget_plan()
        return allowed

    def aim_no_more(self) -> bool:
        """Plan without a limit again, where that was aimed at and cannot be kept; whether it was."""
        aimed = self.soft
        if aimed:
            self.budget, self.soft = None, False
            self.forget_plan()
        return aimed

    def leaves_for_recording(self, captured: Sequence[Planned], limit: int | None) -> None:
        """Leave some of the budget for a recording of the step, where one may be had."""
        none = limit is None or len(captured) > 1 or self.exact or self.recordings is None or not self.leaves_room
        self.aside = 0 if none or limit is None else set_aside(captured[0].costs.values(), limit, self.resident.inputs)

    def plans_anew(self) -> bool:
        """Whether the budget is too short to leave something for a recording: all of it is planned with then."""
        anew = self.aside > 0
        if anew:
            self.leaves_room, self.aside = False, 0
            self.forget_plan()
        return anew

    def arranges_no_more(self, stages: Stages) -> bool:
        """Whether the plan was made with kernels arranged anew; it is made without from now on."""
        if stages.arranges:
            self.rewriting.arranges = False
        return stages.arranges

    @contextlib.contextmanager
    def operator_by_operator(self) -> Iterator[None]:
        """Within: what is planned is what runs, whatever the engine would make of it."""
        before, self.exact = self.exact, True
        try:
            yield
        finally:
            self.exact = before

    def lowerings(self) -> list[tuple[Pass, ...]]:
        """Sets of rewrites for `lowering`, for the step that was seen last, by its predicted time with them.

        Those are left out with which it takes longer than by a plan within the budget.
        """
        if self._search_kept is None:
            return []
        step, room = self.step, None
        if step is not None and step.limit is not None:
            room = self.usable(step.limit) - step.base
        with phase("rewriting"):
            return self._search_kept[1].lowerings(room)

    def all_lowering(self) -> tuple[Pass, ...]:
        """All rewrites for `lowering` that change something of the step that was seen last."""
        return self._search_kept[1].all_lowering() if self._search_kept is not None else ()

    def emitted(self, program: Program, peaks: GraphPeaks) -> tuple[int, int | None]:
        """Put on record what an engine's own code for a graph takes.

        Args:
            program: the graph as captured.
            peaks: as predicted from the code.

        Returns:
            As `judged`.
        """
        step = self.step
        assert step is not None
        self._emitted[fingerprint(program)] = peaks
        if self.proving:
            self._report_code()
        if self.one_graph:
            self.forget_plan()  # another attempt may want another one
        return self.judged()

    def prove_plan(self) -> tuple[Planned, ...] | None:
        """The step that was seen last with its plan proved, where that was left until now; asked again it is there."""
        step = self.step
        if step is None or step.search is None:
            return None
        with phase("rewriting"):
            found = step.search.prove(Found(list(step.planned), step.plan, step.lowering))
        return tuple(found.planned)

    def prepare(self) -> None:
        """Do of `conclude` what can be done before there is code."""
        put_on_record(self.prove_plan() or ())

    def conclude(self) -> None:
        """Prove the plan of the step that was seen last, and put it on record, where that was left until now."""
        step, proved = self.step, self.prove_plan()
        if step is not None and proved is not None:
            self.step = dataclasses.replace(step, planned=proved, search=None)
        if step is not None and any(key in self._emitted for key in step.keys):
            self._report_code()
        elif step is not None and step.planned:  # a warm start has no planned graphs: its stored report stands
            self._report(step.plan.peak_bytes, step.plan.minimum_bytes)

    def _report_code(self) -> None:
        peak = self.code_peak()
        self._report(peak, peak)  # the least of a plan is no promise: what its code takes is known once there is code

    def _report(self, peak: int, minimum: int, measured: int | None = None) -> None:
        assert self.step is not None
        with phase("recording"):
            planned, curve = self.step.planned, self.step.plan.curve
            own = self.step.whole - self.step.base
            self.report = build_report(self, planned, peak, minimum, measured, own, curve)

    def forget_plan(self) -> None:
        """Plan the step that was planned last anew when its graphs are seen again."""
        self._known_plans.forget(map(self._known, self.step.keys if self.step else ()))

    def may_leave(self, graph_break: bool) -> bool:
        """Whether an engine may try its own partition first: a step of one graph, or no budget to be shared."""
        return self.budget is None or not (graph_break or self._known_plans)

    def tighten(self, size: int) -> tuple[int, Report | None, Step | None, list[str]]:
        """Plan for so many bytes less from now on; return what `loosen` takes."""
        before = self.margin, self.report, self.step, list(self.notes)
        self.margin += size
        self.forget_plan()
        return before

    def loosen(self, before: tuple[int, Report | None, Step | None, list[str]]) -> None:
        """Take back what `tighten` did, with the plan of that time on record, and what was said of it."""
        self.margin, self.report, self.step, self.notes[:] = before

    def libraries_keep(self, size: int) -> None:
        """Count so many bytes more as kept by libraries, and hold the allocator to what the budget leaves beside."""
        resident, self.multiplies = self.resident, True
        further = size - max(0, library_bytes(resident.device) - resident.libraries)
        if further > 0:  # else they were known, and left out
            count_library_bytes(resident.device, further)
        self.resident = dataclasses.replace(resident, libraries=resident.libraries + size)
        if self.step is not None:
            self.step = dataclasses.replace(self.step, base=self.step.base + size)
            self.conclude()
        if self.limit_bytes:
            self.hold(self.limit_bytes)

    def forget_search(self) -> None:
        """Let go of the search: the step is lowered, and what was found is in its schedules."""
        self._search_kept = None
        self.rewriting.forget()

    def search_of(self, keys: tuple[str, ...], programs: Sequence[Program]) -> StepSearch:
        """The search for these graphs: what is kept of them between two attempts to plan them."""
        kept = (f"{self.exact} {self.rewriting.arranges}", *keys)  # nothing is fused in what runs operator by operator
        if self._search_kept is None or self._search_kept[0] != kept:
            stages, made = self._stages(), self.rewriting.kept
            graphs = StepGraphs(programs, stages, verify=self.verify, table=self.table, room=self.room, kept=made)
            self._search_kept = kept, StepSearch(graphs, attempt=self.with_trial, seconds=self.plan_seconds)
        return self._search_kept[1]

    def _known(self, key: str) -> Known:
        """What a graph's plan goes by: its fingerprint, and whether it runs operator by operator, or as code."""
        return self.exact, key

    def held_to(self, unconstrained_bytes: int) -> int | None:
        """The budget in bytes, made the allocator's own where the model is to run here."""
        limit = self.limit(unconstrained_bytes)
        if limit is not None and self.table.target is None and not self.soft:
            self.hold(limit)
        return limit

    def _stages(self) -> Stages:
        return self.rewriting.stages(self.exact)

    def with_trial(self, planned: Planned) -> Planned:
        """The planned graph with what a run of it took, where one says something and can be had."""
        if not self.verify or not self.exact:
            return planned
        limit = self.limit(0)
        if limit is not None and planned.timeline.peak_bytes > self.usable(limit) - self.resident.total:
            return planned  # it is refused, or planned for less: `as_tried` takes it before its least is named
        return tried(planned)

    def as_tried(self, refused: BudgetError) -> BudgetError:
        """A refusal of the step that was planned last, whose least is no less than a run of that has taken."""
        planned = self.step.planned if self.step is not None and self.verify and self.exact else ()
        if not planned or all(item.measured is not None for item in planned):
            return refused
        runs = [item if item.measured is not None else tried(item) for item in planned]
        more = measured_peak(runs, 0) - predicted_peak(planned)
        if more <= 0:
            return refused
        least = refused.minimum_bytes + more
        return BudgetError(least, refused.budget_bytes, refused.breakdown, refused.stuck_bytes, refused.beside)
