"""One model's compilation: what is resident, which passes run, what is planned, and the report of it all."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

from memopt.budget import Budget, BudgetError
from memopt.capture.graph_inputs import Names
from memopt.capture.outside import Outside
from memopt.capture.watched import Watched
from memopt.common.progress import planning
from memopt.compilation.collection import Collection, WholeStepNeeded
from memopt.compilation.fallbacks import Fallbacks
from memopt.compilation.freeze import fold_in_place
from memopt.compilation.known_plans import Known
from memopt.compilation.layout import WeightLayout
from memopt.compilation.plan_record import PlanRecord
from memopt.compilation.plan_together import plan_together
from memopt.compilation.planned_step import PlannedStep
from memopt.compilation.size_plans import SizePlans
from memopt.cuda_graphs.pool import GraphPool
from memopt.engine import Engine
from memopt.evidence import Verification
from memopt.memory.allocator_limit import limit_available_bytes
from memopt.memory.cost.table import CostTable
from memopt.memory.resident import Resident
from memopt.memory.tangents import largest_output
from memopt.memory.timeline import timeline
from memopt.pass_manager import Pass
from memopt.program import Program
from memopt.step.budget_state import Step
from memopt.step.eager_peaks import EagerPeaks
from memopt.step.earlier_calls import Figures
from memopt.step.graph_peaks import GraphPeaks
from memopt.step.hooked import EarlyGradients
from memopt.step.inference import Inferred, plan_inference
from memopt.step.plan_request import PlanRequest
from memopt.step.plan_transfer import Sizes
from memopt.step.planned import Planned, fingerprint, predicted_peak
from memopt.step.reference import Reference
from memopt.step.rewriting import Rewriting
from memopt.step.stages import Stages
from memopt.torch_compat.changing_numbers import ChangingNumbers

_LOST = 8  # the allocator may lose this part of a step between blocks


class Session(PlannedStep):
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
        whole_step: bool = False,
        movable: Iterable[str] = (),
    ) -> None:
        super().__init__(budget, resident, Rewriting(passes, backend, table), table, verify)
        self.model_name, self.plan_seconds = model_name, plan_seconds
        self.passes = passes
        self._engine, self._names = backend, names
        self.early = early  # whose gradients are handed over within backward
        self.outside = Outside()  # of captured graphs: what runs there
        self.collection = Collection(possible=whole_step)
        self.record = PlanRecord()
        self.sizes = Sizes() if sizes is None else sizes
        self.reference = Reference() if reference is None else reference
        self.eager = EagerPeaks(self.reference.graphs)
        self.numbers = ChangingNumbers(model_name) if numbers is None else numbers
        self.layout = WeightLayout(movable)
        self.functions: weakref.WeakSet[Watched] = weakref.WeakSet()
        self.inferred = Inferred()
        self.frozen = frozen  # whether batch norms may be folded into the model's own weights
        self.exact = backend.exact
        self.size_plans = SizePlans()
        self.not_recalled: set[str] = set()  # keys of graphs whose code of an earlier process is not enough
        self.fallbacks = Fallbacks(model_name, "" if budget is None else budget.text)

    @property
    def dry(self) -> bool:
        """Whether graphs are only collected: nothing needs to be compiled."""
        return self.collection.graphs is not None

    @contextlib.contextmanager
    def collects(self, names: Names) -> Iterator[list[Program]]:
        """Within: graphs are only collected, of a model whose tensors have these names; gives the list of them."""
        before, self._names = self._names, lambda: names
        try:
            with self.collection.collecting() as collected:
                yield collected
        finally:
            self.ledger = None
            self._names = before

    def runs_here(self, graph_pool: GraphPool | None, hold: Callable[[int], None]) -> None:
        """Its steps run on this device: captured there, if there is a pool, within the limit that `hold` is told."""
        self.graph_pool, self.hold = graph_pool, hold

    def makes_way(self, graph: Figures | None) -> None:
        """Give back the memory of CUDA graphs where a step may lack it that is not captured, and planned without them.

        Args:
            graph: the step, which is about to run; None: what it takes is not known.
        """
        available = None if graph is None else limit_available_bytes()
        size = 0 if graph is None else max(graph.peaks.forward, graph.peaks.backward)
        if self.graph_pool is not None and (available is None or available < size + size // _LOST):
            self.graph_pool.release()

    @contextlib.contextmanager
    def rewritten_by(self, passes: Sequence[Pass]) -> Iterator[None]:
        """Within: these passes alone rewrite training steps."""
        before, self.rewriting = self.rewriting, Rewriting(passes, self._engine, self.table)
        try:
            yield
        finally:
            self.rewriting = before

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
        if self.collection.may_begin and self.role.trains:
            raise WholeStepNeeded

    def see_whole_step_of_training(self) -> None:
        """A graph with gradients comes, and others after it: said before it is lowered, which would be in vain.

        Raises:
            WholeStepNeeded: nothing of the step is planned yet, and it is certain that all of it will be asked for.
        """
        certain = self.budget is not None or self._engine.exact  # an engine's own partition may do without, else
        if certain and self.collection.may_begin and not self.known_plans:
            raise WholeStepNeeded

    def may_lack(self, program: Program, graph_break: bool) -> bool:
        """Whether a step of a joint program may need its gradients handed over as they come, to keep the budget.

        Those of one of several graphs may wait for another graph's of the same parameter. A step that hands gradients
        over is not captured: where it may be, the answer is of what it takes as it is.
        """
        if graph_break or self.collection.complete or self.broken or self.dry:
            return False
        limit = None if self.exact or self.graph_pool is None else self.limit(0)
        return limit is None or self.resident.total + timeline(program).peak_bytes > self.usable(limit)

    def inference(self, program: Program) -> Program:
        """Rewrite an inference program; raise BudgetError when its peak is over the budget."""
        if self.collection.graphs is not None:
            self.collection.graphs.append(program)
            return program
        program = self.layout.laid_out(program, fingerprint(program))
        folded = fold_in_place(program) if self.frozen else []
        if folded:
            self.note(f"frozen by consent: {len(folded)} batch norms were folded into the model's own weights")
        # An engine that measures its own runs is held to them, not to the timeline of other kernels.
        with planning(self.model_name):
            return plan_inference(self, program, by_timeline=not self._engine.measures).program

    def training(self, program: Program, graph_break: bool, request: PlanRequest | None = None) -> Program:
        """Rewrite and plan a joint program, as an engine requests, if it does.

        Raises:
            WholeStepNeeded: there are more graphs to come, and the caller can show all of them; or it has shown others.
            BudgetError: no plan keeps the budget.
        """
        key, request = fingerprint(program), request or PlanRequest()
        self.eager.lowered_is(key)
        known = self.known(key)
        if self.collection.graphs is not None:
            self.collection.graphs.append(program)
            return self.known_plans.replayed(known, program, self.stages()) if self.collection.rehearsing else program
        if request.search and self._is_planned_beside_the_same(known, program):
            last = self.step.planned[0] if self.step is not None and self.one_graph else None
            if last is not None and last.source is program and last.choice is not None:
                return last.program  # planned a moment ago, and not replaced since
            return self.known_plans.replayed(known, program, self.stages())
        another = bool(self.known_plans) and not self.one_graph  # one of several graphs, at another size
        strange = self.collection.complete and self.step is not None and key not in self.step.keys
        if request.search and (strange or (self.collection.possible and (graph_break or another))):
            raise WholeStepNeeded
        (planned,) = self.plan_training([program], by_timeline=self.exact, request=request)
        if planned.source is program:
            return planned.program
        # Planned for an equal graph that was captured before: a graph is lowered by the capture that made it.
        schedule = planned.choice.plan.schedule if planned.choice else None
        return self.known_plans.replayed_by(known, program, self.stages(), schedule)

    def _is_planned_beside_the_same(self, known: Known, program: Program) -> bool:
        """Whether a graph is planned, and that together with the graphs of the other calls of this very step."""
        if self.calls == 1 or self.broken or self.collection.complete:
            return known in self.known_plans
        every, _ = self._with_other_calls([program])
        return self.known_plans.serves(known, [self.known(fingerprint(each)) for each in every])

    def plan_training(
        self, programs: Sequence[Program], *, by_timeline: bool = True, request: PlanRequest | None = None
    ) -> list[Planned]:
        """Plan all graphs of one call, together with those of the other calls of its step where there are several.

        They are planned anew in place where less may be allowed for a loss.

        Args:
            programs: the graphs as captured.
            by_timeline, request: as `plan_together`.

        Raises:
            BudgetError: no plan keeps the budget; the first refusal, whose minimum is with all that is allowed for a
                loss; where that is much it says so.
        """
        refused: list[BudgetError] = []
        while True:
            try:
                return self._planned_together(programs, request or PlanRequest(), by_timeline=by_timeline)
            except BudgetError as error:
                refused.append(error)
            if not self.allows_no_more():
                raise refused[0].allowing(refused[-1].minimum_bytes, largest_output(programs[-1]))

    def _planned_together(
        self, programs: Sequence[Program], request: PlanRequest, *, by_timeline: bool
    ) -> list[Planned]:
        """The plans of these graphs, with what is allowed for a loss by now; as `plan_training`."""
        self.expect_known_calls(programs)
        self.expects_loss(programs)
        every, first = self._with_other_calls(programs)
        with self.around_graphs():
            return plan_together(self, every, request, by_timeline=by_timeline)[first : first + len(programs)]

    def plans(self, step: Step, stages: Stages, measured: int | None) -> None:
        """Put a plan of the step on record, whether it keeps the budget or not.

        Args:
            step: as planned.
            stages: that the plan was made with.
            measured: the most bytes that a trial of it took above what is resident; None where there was none.
        """
        self.known_plans.made_with(map(self.known, step.keys), stages, step.lowering)
        self.note_failures(step.planned)
        self.step = step
        if self.record.at_once:
            self.record.of_plan(self, measured)

    def sees_step(self, keys: tuple[str, ...], captured: Sequence[Planned], base: int) -> int:
        """The bytes that the step of these graphs takes as eager runs it, which fractions are of.

        With the loss that is usual where none was seen yet: what another takes beyond is seen in the first step.
        """
        with self.around_graphs(usual=True):
            whole, step, calls = self._of_the_step(keys, captured, base, predicted_peak(captured))
        whole = max(whole, self.optimizer_peak()) if self.role.trains else whole
        self.reference.trains(whole, step, calls)
        return whole

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
        if self.record.at_once:
            self.record.of_code(self)
        if self.one_graph:
            self.forget_plan()  # another attempt may want another one
        return self.judged()

    def keep_libraries(self, size: int) -> None:
        """As of the account, with what is on record, and the allocator held to what the budget leaves beside."""
        super().keep_libraries(size)
        if self.step is not None:
            self.step = dataclasses.replace(self.step, base=self.step.base + size)
            self.record.conclude(self)
        if self.limit_bytes:
            self.hold(self.limit_bytes)

    def held_to(self, unconstrained_bytes: int) -> int | None:
        """The budget in bytes, made the allocator's own where the model is to run here."""
        limit = self.limit(unconstrained_bytes)
        if limit is not None and self.table.target is None and not self.soft:
            self.hold(limit)
        return limit
