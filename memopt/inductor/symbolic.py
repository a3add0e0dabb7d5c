"""A training step lowered once for many sizes: Inductor's code of a joint graph whose sizes are symbols.

Torch's own partitioner cuts the graph. The code's wrapper, run on fake tensors, tells what it takes at any sizes: those
that were counted for run at once, and smaller ones where every tensor is smaller then; others are counted first, and
planned by themselves where they would be over the budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from memopt.budget import BudgetError
from memopt.capture.at_sizes import at_sizes
from memopt.capture.dynamo import Hooks, compilation_of
from memopt.capture.joint import Partitioned
from memopt.common.phases import phase
from memopt.engine import ManySizes
from memopt.inductor.forked_codegen import ForkedCodegen
from memopt.inductor.forward_backward import ForwardBackward
from memopt.inductor.min_cut_partition import save_overwritten
from memopt.inductor.partition import Partition, compile_training, keep_order
from memopt.inductor.planned_sizes import SizedPlan, cut_by, plan_of
from memopt.inductor.served_sizes import ServedSizes, sizes_errors
from memopt.inductor.warm_sizes import WarmSizes
from memopt.inductor.workspace import MeasuredWorkspace
from memopt.memory.distributed import has_group
from memopt.memory.resident import storage_bytes
from memopt.passes.checkpoint import Checkpoint
from memopt.program import InputKind, Program
from memopt.step.plan_request import PlanRequest
from memopt.step.sizes_apart import MadeAnewError, SizesError
from memopt.torch_compat.min_cut import min_cut
from memopt.torch_compat.static_shapes import largest_seen
from memopt.torch_compat.symbols import Sized, Sizes, grows_everywhere, hints_of

# So often code is made by a plan for sizes that were larger than ever, each for sizes larger by a part.
_PLANS, _FURTHER = 3, 8
# So many eighths of sizes further than any that are known it is counted at most, as they grow again and again.
_COUNTED_FURTHER = 4
# The ways in which it is made for one size, until the code of one keeps the budget: the share of the budget that the
# plan leaves, and whether code is in the plan's order; else it is in Inductor's own, which takes less as a rule.
_ATTEMPTS = ((0.0, False), (0.0, True), (1 / 16, False))


class _NoPlan(Exception):
    """There is none for so little."""


class SymbolicTraining:
    """One graph's lowering for many sizes."""

    def __init__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks) -> None:
        """Take a Dynamo graph whose sizes are symbols, its inputs, and what makes a program of its joint graph."""
        self.graph_module, self.example_inputs, self.hooks = graph_module, example_inputs, hooks
        self.session = compilation_of(hooks)
        self._graphs, self._request = ForwardBackward(hooks.backward), PlanRequest()
        self._ahead = ForkedCodegen()
        self._joint: tuple[fx.GraphModule, int] | None = None  # with symbols, and how many outputs forward has
        self._sizes = ServedSizes(hooks, example_inputs)
        self._grown = 0  # how often sizes came that were larger than any that are known
        self._at: Sizes = {}  # the sizes that were planned last
        self._more_inputs = 0  # bytes by which the call's inputs are counted as larger than they are
        self._step: Any = None  # the session's, as the code was counted last
        self._loaded = False  # whether its kernels are
        self._plan: SizedPlan | None = None  # that the code follows
        self._plans = False  # whether a plan says what is saved; else torch's own partition
        self._warm = WarmSizes(graph_module, example_inputs, hooks)

    def compile(self) -> ManySizes:
        """Lower the step for the sizes of this call, and for others.

        Raises:
            SizesError: the code does not keep the budget, or none is made of such a graph.
        """
        session = self.session
        if self.hooks.graph_break or session.calls > 1 or has_group():
            raise SizesError("a step of several graphs, calls or processes shares its budget among them")
        if session.early is not None and session.early.hooked.early:
            raise SizesError("gradients are handed over within backward")
        self._plans = session.size_plans.begins()
        with sizes_errors():
            sizes = hints_of(self.example_inputs)
            try:
                run = self._warm.found(sizes, self._sizes, planned=self._plans)
            except SizesError as error:
                raise self._over(sizes) from error
            if run is None:
                with self._alone():
                    run = self._lowered(sizes)
                self._warm.lowered(self._graphs)
                self._warm.remember(self._at, self._sizes)
            self._step = session.step
        self.example_inputs = ()  # they are the caller's to let go of
        return ManySizes(self.count_for, run)

    def count_for(self, args: Sequence[Any]) -> None:
        """Count what the code takes with these inputs of the graph, unless sizes that it was counted for cover them.

        Raises:
            SizesError: the budget is not kept at their sizes.
        """
        sizes = self._sizes.of(args)
        if self._sizes.kept(sizes):
            step = self.session.step
            if step is None or self._step is None or step.keys != self._step.keys:
                self.session.goes_back_to(self._step)  # another size was planned since, by itself
            self._load()
            return
        if self._sizes.refused(sizes):
            raise self._over(sizes)
        if self._warm.runs:
            self._warm.take_up(sizes, self._sizes)
            self._step = self.session.step
            return
        try:
            self._count_more(sizes)
        except SizesError as error:
            self._sizes.refuse(sizes)
            self._warm.remember(sizes, self._sizes)
            raise self._over(sizes) from error
        self._warm.remember(self._at, self._sizes)
        self._step = self.session.step
        self._load()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Within, nothing is planned, and rewrites nothing: the partition is torch's own."""
        session = self.session
        self._request.search, self._request.lowering = False, ()
        try:
            with session.rewritten_by(()), session.record.put_off():
                yield
                session.record.conclude(session)
        finally:
            self._request.search = True
            session.forget_search()
            inputs = session.resident.inputs - self._more_inputs
            session.counts_resident(dataclasses.replace(session.resident, inputs=inputs))
            self._more_inputs = 0

    def _over(self, sizes: Sizes) -> SizesError:
        """That the budget is not kept at these sizes; code is made for them by a plan, but not often."""
        if self.session.size_plans.made >= _PLANS:
            return self._sizes.not_kept(sizes)
        self.session.size_plans.want()
        if self._plans:
            self.session.not_recalled.add(self.hooks.key)
        return MadeAnewError(str(self._sizes.not_kept(sizes)))

    def _lowered(self, sizes: Sizes) -> Callable[..., Any]:
        """The step for these sizes by torch's own partition, or by plans until the code of one keeps the budget."""
        session = self.session
        before, graphs = session.step, self._graphs
        for number, (share, kept) in enumerate(_ATTEMPTS if self._plans else _ATTEMPTS[:1]):
            try:
                run = self._attempt(sizes, share, kept=kept, first=not number)
            except _NoPlan:
                self._graphs = graphs
                break
            graphs = self._graphs
            excess = self._excess(self._at)
            if excess > 0 and self._at != sizes:  # of larger sizes, which need not be served
                self._sizes.refuse(self._at)
                self._plan_first([sizes])
                excess = self._excess(sizes)
            if excess <= 0 or self._plan is None:
                break
        if excess > 0:  # kernels are compiled for sizes that it serves, if such come
            self._sizes.refuse(sizes)
            session.goes_back_to(before)
            if self._plans:
                session.size_plans.end(_PLANS)  # there is no better one
        else:
            self._sizes.keep(self._at)
            self._load()
        self.hooks.saves(self._graphs.recomputed, self._graphs.in_part)
        return run

    def _attempt(self, sizes: Sizes, share: float, *, kept: bool, first: bool) -> Callable[..., Any]:
        """Lower the step once; see `_ATTEMPTS`. But for the first time that is by a plan, or not at all."""
        self._graphs, policy = ForwardBackward(self.hooks.backward, self._ahead), contextlib.ExitStack()
        self._sizes.forget()  # of what other code takes
        correction = -int(share * self.session.limit_bytes)

        def cut(joint: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Partitioned:
            self._joint = joint, options["num_fwd_outputs"]
            self._sizes.grows = grows_everywhere(joint)
            self._plan = self._planned_for(sizes, correction) if self._plans else None
            if self._plan is None and not first:
                raise _NoPlan
            if kept:
                keep_order(policy, partition)
            mutated = self._plan_first(self._sizes.to_count(sizes, 0, _seen(sizes))).mutated
            with phase("cutting"):
                if self._plan is not None:
                    return cut_by(self._plan, joint, **options)
                save_overwritten(joint, mutated)
                return min_cut(joint, joint_inputs, **options)

        partition, attempt = Partition(cut), self._warm.attempt()
        with policy, self._ahead.within():
            return compile_training(  # type: ignore[no-any-return]
                self.graph_module, self.example_inputs, self._graphs.compile, partition, cached=attempt
            )

    def _planned_for(self, sizes: Sizes, correction: int) -> SizedPlan | None:
        """A plan for an eighth more than the largest sizes so far, or than these, or for these; None without one."""
        session = self.session
        largest, larger = (
            {symbol: size + size // _FURTHER for symbol, size in each.items()} for each in (_seen(sizes), sizes)
        )
        further = [largest, larger] if largest != larger else [larger]
        self._request.search, self._request.correction = True, correction
        candidates = (*further, sizes) if self._sizes.grows and not correction else (sizes,)
        try:
            with session.rewritten_by((Checkpoint(),)):
                return next(filter(None, (self._plan_at(each, sizes) for each in candidates)), None)
        finally:
            self._request.search, self._request.correction = False, 0

    def _plan_at(self, sizes: Sizes, own: Sizes) -> SizedPlan | None:
        """A plan for these sizes, in a call that has its own; None where it keeps no budget or is of another graph."""
        session, plan = self.session, None
        with contextlib.suppress(BudgetError, RuntimeError, ValueError):  # a model may have a largest size
            program = self._planned(sizes, own)
            assert session.step is not None
            peak, feasible = session.step.plan.peak_bytes, session.feasible
            session.forget_plan()
            session.forget_search()
            plan = plan_of(program, peak) if feasible else None
            if plan is not None and (self._joint is None or not plan.is_of(self._joint[0])):
                plan = None
        return plan

    def _load(self) -> None:
        """Compile and load the kernels, unless they are there."""
        if not self._loaded and not self._warm.runs:
            with phase("compiling kernels"):
                self._graphs.load()
            self._loaded = True

    def _planned(self, sizes: Sizes, own: Sizes) -> Program:
        """The step at these sizes as the session plans it, which is as it is, in a call that has its own sizes."""
        assert self._joint is not None
        joint, outputs = self._joint
        graph = at_sizes(joint, sizes)
        self._count_inputs(self.hooks.capture(graph, outputs), sizes, own)
        return self.hooks.rewrite(graph, outputs, self._request)

    def _plan_first(self, candidates: Sequence[Sizes]) -> Program:
        """Plan the step as it is at the first of these sizes that it can have; the last ones are the call's own."""
        *larger, own = candidates
        for sizes in larger:
            with contextlib.suppress(RuntimeError, ValueError):  # a model may have a largest size
                program, self._at = self._planned(sizes, own), sizes
                return program
        self._at = own
        return self._planned(own, own)

    def _count_inputs(self, program: Program, sizes: Sizes, own: Sizes) -> None:
        """Count the step's inputs, which are there already, as they are at these sizes and not at the call's own."""
        assert self._joint is not None
        given = [node.name for node, entry in zip(program.placeholders, program.inputs, strict=True)
                 if entry.kind is InputKind.USER]  # fmt: skip
        values = [node.meta["val"] for node in self._joint[0].graph.nodes if node.name in given]
        more = storage_bytes(Sized(sizes)(values)) - storage_bytes(Sized(own)(values))
        session = self.session
        inputs = session.resident.inputs + more - self._more_inputs
        session.counts_resident(dataclasses.replace(session.resident, inputs=inputs))
        self._more_inputs = more

    def _excess(self, sizes: Sizes) -> int:
        """Put on record what code of the step that was planned last takes at these sizes.

        Returns:
            Bytes over the budget; 0 without one.

        Raises:
            SizesError: the code could not be followed.
        """
        captured = self.hooks.captured
        assert captured is not None
        with sizes_errors(), phase("replaying code"):
            peaks = self._graphs.at(Sized(sizes)).peaks(captured, MeasuredWorkspace(self.session.table))
        return self.session.emitted(captured, peaks)[1] or 0

    def _count_more(self, sizes: Sizes) -> None:
        """Plan and count the step for other sizes; where the budget is not kept there, what was known before stands.

        Raises:
            SizesError: it is not kept.
        """
        session, hooks = self.session, self.hooks
        before = session.step, hooks.captured
        candidates = self._sizes.to_count(sizes, min(self._grown, _COUNTED_FURTHER))
        self._grown += 1
        with self._alone():
            while candidates:
                self._plan_first(candidates)
                if self._excess(self._at) <= 0:
                    self._sizes.keep(self._at)
                    return
                session.goes_back_to(before[0])
                hooks.goes_back_to(before[1])
                self._sizes.refuse(self._at)
                candidates = candidates[candidates.index(self._at) + 1 :]
            raise self._sizes.not_kept(sizes)


def _seen(sizes: Sizes) -> Sizes:
    """The largest that each of these sizes was in any call so far."""
    return {symbol: largest_seen(size) for symbol, size in sizes.items()}
