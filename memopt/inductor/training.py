"""How a training step becomes Inductor's code that keeps its budget: torch's own partition, then plans, then none."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from memopt.backends.aten import AtenBackend
from memopt.backends.hand_over import relayed
from memopt.capture.dynamo import Hooks, compilation_of, outside_tracing
from memopt.capture.joint import Partitioned, positions
from memopt.common.garbage import collect_early
from memopt.common.phases import phase
from memopt.engine import Recalled
from memopt.errors import first_line
from memopt.host.buffers import keep_for
from memopt.inductor.forked_codegen import ForkedCodegen
from memopt.inductor.forward_backward import ForwardBackward
from memopt.inductor.generated import cuda_graph_step
from memopt.inductor.joint_cache import JointCache
from memopt.inductor.known_routes import KnownRoutes, Route, key_of
from memopt.inductor.min_cut_partition import MinCutPartition
from memopt.inductor.partition import Partition, compile_training, free_at_once, gradients_early, keep_order
from memopt.inductor.plans import KnownPlan, Plans
from memopt.inductor.recalled import recalled
from memopt.inductor.replay import ReplayError
from memopt.inductor.trace import Trace
from memopt.inductor.workspace import MeasuredWorkspace
from memopt.memory.hand_over import sources
from memopt.program import Program
from memopt.step.budget_trial import step_decides
from memopt.step.graph_peaks import GraphPeaks
from memopt.step.hooked import HELD
from memopt.step.plan_feedback import corrected
from memopt.step.plan_request import PlanRequest
from memopt.step.verified_minimum import VerifiedMinimums
from memopt.torch_compat.inductor_errors import InductorError

log = logging.getLogger("memopt")


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """One way to lower a step. `excess` is None without a budget."""

    run: Callable[..., Any]
    graphs: ForwardBackward
    peaks: GraphPeaks | None
    route: Route
    saving: int = 0
    excess: int | None = None
    step: Any = None  # what was planned
    entry: Any = None  # of torch's cache of joint graphs

    @property
    def fits(self) -> bool:
        return self.excess is None or self.excess <= 0


class Training:
    """One graph's lowering, under one limit after the other: what was too much for a limit is for a lower one."""

    def __init__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks) -> None:
        """Take a Dynamo graph, its inputs, and what rewrites its joint graph."""
        self.graph_module, self.example_inputs, self.hooks = graph_module, example_inputs, hooks
        self.session = compilation_of(hooks)
        self.request = PlanRequest()  # what is asked of the next plan
        self._own = MinCutPartition(hooks, self.request)
        self._key = ""  # of what settled the step, once its graph is there
        self._followed: Route | None = None  # what settled it in another process, as long as it is followed
        self._ahead = ForkedCodegen()
        self._joint_cache = JointCache()
        self._begin()
        self._before: Route | None = None  # what the graph was settled with under a larger limit
        self._minimum: int | None = None  # bytes for tensors with which code was made that would be made again

    def forget(self) -> None:
        """Let go of graphs, of code that is not in use, and of inputs, which may be the caller's batch."""
        self.example_inputs = ()
        self._begin()

    def _begin(self) -> None:
        self._trace = Trace()
        self._first_plan: _Attempt | None = None  # made where torch's own partition was seen to be hopeless
        self._codes: dict[str, _Attempt] = {}  # of plans, whatever limit they were made for
        self._plans: Plans[_Attempt] = Plans(self.hooks, self.request, self._codes)

    def compile(self) -> Callable[..., Any]:
        """Lower the step until its code keeps the budget.

        Raises:
            BudgetError: no plan keeps it, operator by operator either.
        """
        session = self.session
        if session.code_fails:
            return self._operator_by_operator(None)
        attempt = self._deepest() if session.naming else None
        if attempt is None:
            attempt = self._lowered_from(self._before or Route(planned=False))
        if attempt is not None or not session.one_graph:
            session.record.conclude(session)
        self._before = None if attempt is None or session.naming else attempt.route
        if attempt is None and session.plans_anew():
            return self.compile()
        if attempt is None:
            return self._operator_by_operator(self._minimum)
        if self._key and self._followed is None and attempt.fits and not session.naming:
            KnownRoutes().put(self._key, attempt.route)
        with phase("compiling kernels"):
            attempt.graphs.load()
        session.waits_on_host(() if attempt.graphs.forward is None else attempt.graphs.forward.waiting)
        if attempt.graphs.forward is not None and attempt.graphs.forward.waiting:
            keep_for(attempt.run)
        if session.graph_pool is not None and self.hooks.captured is not None:
            step = attempt.graphs.cuda_graph_step(self.hooks.captured, session.graph_pool)
            self.hooks.may_be_captured(attempt.run, step)
        self.hooks.may_be_repeated(attempt.run, self._repeatable(attempt))
        self.hooks.saves(attempt.graphs.recomputed, attempt.graphs.in_part)
        return attempt.run

    def recall(self, facts: bytes) -> Recalled:
        """The step as torch's cache has it for these facts, beside what torch itself goes by."""
        found = recalled(self.graph_module, self.example_inputs, self.hooks, self._joint_cache, facts)
        if found is None:
            return Recalled(self._joint_cache.key)
        made = functools.partial(cuda_graph_step, found.forward, found.backward)
        return Recalled(self._joint_cache.key, found.run, made)

    def _repeatable(self, attempt: _Attempt) -> Callable[[], None] | None:
        """Keeps the code for `recall`; None where it cannot be kept."""
        forward, backward, entry = attempt.graphs.forward, attempt.graphs.backward, attempt.entry
        if backward is not None and backward.pieces is not None:
            return None
        if entry is None or forward is None or forward.waiting:  # what waits on the host, backward asks for by name
            return None
        return functools.partial(self._joint_cache.write, entry)

    def _deepest(self) -> _Attempt | None:
        """Code of the deepest plan, which is there where it was refused before; None where that is too much."""
        self._before, self._followed = None, None
        self._own.begin_anew()
        with self._beginning_with(self._deepest_route()):
            attempt = self._attempt(planned=True)
        return attempt if attempt is not None and attempt.fits else None

    def _deepest_route(self) -> Route:
        """The deepest plan there is, for a budget in bytes."""
        budget = self.session.budget
        assert budget is not None and budget.bytes is not None
        return Route(planned=True, correction=-budget.bytes)

    def _lowered_from(self, known: Route) -> _Attempt | None:
        """The step lowered until its code keeps the budget, beginning with what settled it once; None: none does."""
        session = self.session
        attempt: _Attempt | None = None
        with self._beginning_with(known):
            if not known.planned and session.may_leave(self.hooks.graph_break):
                lowering = session.rewriting.called(known.lowering, session.exact) or ()
                self.request.search, self.request.lowering = False, lowering
                attempt = self._unplanned()
            if attempt is None:
                self.request.search, self.request.lowering = True, ()
                attempt = self._search()
        return attempt

    @contextlib.contextmanager
    def _beginning_with(self, known: Route) -> Iterator[None]:
        """Within, code is made for one limit, and what is proved and put on record waits."""
        session = self.session
        try:
            self._start_from(known)
            with session.record.put_off():
                yield
        finally:
            self.request.search, self.request.correction, self.request.lowering = True, 0, ()
            self._plans = Plans(self.hooks, self.request, self._codes)

    def _operator_by_operator(self, least: int | None) -> Callable[..., Any]:
        """The graph as its operators; it is refused naming no more than `least` bytes, which code does with."""
        session = self.session
        if session.limit_bytes and not session.one_graph:  # other graphs may have run: they were judged together
            assert session.report is not None
            raise session.over(session.report.peak_bytes, session.limit_bytes)
        session.note(
            "no code of Inductor's was found that keeps the budget: this graph runs operator by operator, as with "
            "backend='aten'"
        )
        session.unsay(HELD)
        session.withdraw(self.hooks.captured)

        def lower() -> Callable[..., Any]:
            return AtenBackend().compile_captured(self.graph_module, self.example_inputs, self.hooks)

        with session.operator_by_operator():
            return session.refused_at_most(lower, least)

    def _unplanned(self) -> _Attempt | None:
        """Torch's partition and order, with the rewrites that let it keep the budget in the least time; None: none do.

        Where the step was settled before, it is lowered in that way at once, be it by a plan.
        """
        session = self.session
        while True:
            attempt = self._attempt(planned=False)
            if self._followed is not None and (attempt is None or not attempt.fits):
                self._followed = None  # what kept the budget then does not now
                self._start_from(Route(planned=False))
                self.request.search, self.request.lowering = False, ()
                continue
            if self._followed is None and attempt is not None and attempt.route.planned:
                self._first_plan = attempt
                return None
            if attempt is not None and (attempt.fits or step_decides(session, self.hooks, attempt.excess or 0)):
                return attempt
            little = attempt is not None and self._own.spare(attempt.excess or 0)
            if not little and not self._own.next_lowering():
                return None

    def _start_from(self, known: Route) -> None:
        self.request.correction = known.correction if known.planned else 0
        self._own.spared = 0 if known.planned else max(0, -known.correction)

    def _search(self) -> _Attempt | None:
        session = self.session

        def attempt() -> _Attempt | None:
            found, self._first_plan = self._first_plan or self._attempt(planned=True), None
            return found

        best, last = corrected(session, self.request, attempt, lambda: session.one_graph)
        if best is not None:
            session.goes_back_to(best.step)
        if best is not None and not last and best.peaks is not None:
            assert self.hooks.captured is not None
            session.emitted(self.hooks.captured, best.peaks)
        return best

    # -- one attempt ---------------------------------------------------------------------------------------------

    def _attempt(self, *, planned: bool) -> _Attempt | None:
        """Lower the step by a plan, or by torch's own partition, and then by a plan where that is hopeless."""
        session = self.session
        graphs = ForwardBackward(self.hooks.backward, self._ahead, self._meanwhile, breaks=self.hooks.graph_break)
        with contextlib.ExitStack() as policy:

            def cut(joint: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Any:
                if not self._key and self._may_be_settled():
                    self._look_up(self.hooks.capture(joint, options["num_fwd_outputs"]))
                if not self.request.search:
                    found = self._own_cut(joint, joint_inputs, **options)
                    if found is not None:
                        if self.request.lowering:
                            keep_order(policy, partition, added_only=True)
                        elif self._own.short:
                            free_at_once(policy)
                        if self.hooks.handed.early:
                            gradients_early(policy)
                        return found
                    self.request.search, self.request.lowering = True, ()
                keep_order(policy, partition)
                return self._plans.cut(joint, foresee=self._followed is None, **options)

            self.request.search, partition = planned, Partition(cut)
            try:
                with self._ahead.within():
                    run = compile_training(
                        self.graph_module,
                        self.example_inputs,
                        graphs.compile,
                        partition,
                        self._trace,
                        self._joint_cache.attempt(),
                    )
            except InductorError as error:  # the graph may hold what this version of Inductor has no code for
                session.note(f"Inductor has no code for this graph: {first_line(error)}")
                log.debug("where that was", exc_info=error)
                return None
            except KnownPlan:
                return self._again()
        captured = self.hooks.captured
        assert captured is not None
        run = self._handing_over(run, captured, graphs)
        correction = self.request.correction if self.request.search else -self._own.spared
        route = Route(self.request.search, tuple(item.key for item in self.request.lowering), correction)
        try:
            with phase("replaying code"):
                peaks = graphs.peaks(captured, MeasuredWorkspace(session.table))
        except ReplayError as error:
            session.note(f"the peak of the generated code is not known: {error}")
            return None if session.limit_bytes else _Attempt(run, graphs, None, route)  # it cannot be promised
        saving, excess = session.emitted(captured, peaks)
        log.info("code of %s takes %d bytes: %s", route.described, session.code_peak(), _against(excess))
        taken = 0 if excess is None else excess + session.usable(session.limit_bytes)
        if taken and not route.planned:
            self._own.took(route.lowering, taken)
        if taken and session.one_graph and not (self.request.search and session.feasible):
            self._minimum = taken if self._minimum is None else min(self._minimum, taken)
        entry = self._joint_cache.latest_entry()
        attempt = _Attempt(run, graphs, peaks, route, saving, excess, session.step, entry)
        if route.planned:
            self._plans.code = attempt
            self._plans.took(session.code_peak())
        return attempt

    def _handing_over(self, run: Callable[..., Any], captured: Program, graphs: ForwardBackward) -> Callable[..., Any]:
        """The step whose gradients go to hooks, or to what reduces them, as soon as they are final."""
        early, hooks = self.session.early, self.hooks
        if early is None:
            return run
        wanted = hooks.handed.early
        pieces = graphs.hand_over(captured, wanted, hooks.backward) if wanted else None
        if pieces is None:
            if early.hooked.names:
                self.session.note(HELD)
            return run
        position = positions(captured.graph_module)
        return relayed(run, pieces.outputs, sources(captured, position), hooks.handed.watched(hooks.dropped))

    def _meanwhile(self, graphs: ForwardBackward) -> None:
        """Do what there will be to do while backward's code is generated elsewhere."""
        with outside_tracing(), contextlib.suppress(Exception):  # what fails now fails when it is its turn
            self.session.record.prepare(self.session)
            graphs.follow_forward(MeasuredWorkspace(self.session.table))
            if graphs.forward is not None and self.session.resident.device.type == "cuda":
                graphs.forward.load()
                collect_early()  # a step that is tried needs memory that garbage may hold

    def _again(self) -> _Attempt:
        """The attempt that was made with the plan that was found now, too, or with one that is as good."""
        known, captured, session = self._plans.code, self.hooks.captured, self.session
        assert known is not None and known.peaks is not None and captured is not None
        if not self._plans.same:
            session.goes_back_to(known.step)
        saving, excess = session.emitted(captured, known.peaks)
        if (saving, excess) == (known.saving, known.excess):
            return known
        return dataclasses.replace(known, saving=saving, excess=excess, step=session.step)

    def _own_cut(self, joint: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Partitioned | None:
        """Both graphs by torch's partition, at first the one that settled the step once; None: no such cut has room."""
        if self._followed is not None:
            graphs = self._own.cut(joint, joint_inputs, **options)
            if graphs is not None:
                return graphs
            self._followed = None
            self._start_from(Route(planned=False))
            self.request.lowering = ()
        return self._own.first_cut(joint, joint_inputs, **options)

    def _may_be_settled(self) -> bool:
        """Whether what settled this step is worth keeping: a step of one graph, with a budget."""
        return self.session.budget is not None and bool(self.session.may_leave(self.hooks.graph_break))

    def _look_up(self, captured: Program) -> None:
        """Follow what settled the step in another process, where that is known."""
        session = self.session
        self._key = key_of(session, captured)
        known = KnownRoutes().get(self._key)
        if known is None and VerifiedMinimums().near(session, captured) is not None:
            known = self._deepest_route()
        lowering = None if known is None else session.rewriting.called(known.lowering, session.exact)
        if known is not None and lowering is not None:
            self._followed = known
            self._start_from(known)
            self.request.search, self.request.lowering = known.planned, lowering


def _against(excess: int | None) -> str:
    if excess is None:
        return "there is no budget"
    return f"{excess} more than the budget" if excess > 0 else f"{-excess} of the budget are left"
