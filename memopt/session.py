"""One model's compilation: what is resident, which passes run, what is planned, and the report of it all."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memopt.budget import Budget, BudgetError
from memopt.capture.dynamo import Engine, Names
from memopt.choice import acceptable, cheapest, joined, unused
from memopt.evidence import Verification
from memopt.memory.allocator import slack_bytes, use_expandable_segments, with_slack
from memopt.memory.cost.table import CostTable, OperatorCost
from memopt.memory.optimizer import OptimizerFootprint
from memopt.memory.rounding import allocated_bytes
from memopt.memory.timeline import Timeline, timeline
from memopt.pass_manager import Pass, PassManager, PassRecord
from memopt.passes.checkpoint import Checkpoint, workspace
from memopt.planner import Choice, GraphPeaks, StepPlan, StepPlanner, peaks_of, step_peak
from memopt.program import InputKind, Program, describe, tensors_of
from memopt.report.build import build_report
from memopt.report.record import Report
from memopt.solve.schedule import Schedule
from memopt.trial import TrialError, trial

log = logging.getLogger("memopt")

# How often a plan whose measured step went over the budget is tightened before the budget is called infeasible.
_TIGHTENINGS = 3


class WholeStepNeeded(Exception):
    """A graph break: the budget is shared among several graphs, so all must be seen before the first is planned."""


@dataclasses.dataclass(frozen=True)
class Resident:
    """What the device holds during the whole step, in bytes.

    Attributes:
        parameters: by storage; tied weights once.
        buffers: by storage.
        inputs: the caller's tensors.
        gradients: that exist already when the step begins (accumulation).
        optimizer: the optimizer's state, and its temporaries while it steps; None without an optimizer.
        trainable: bytes of all gradients of trainable parameters together.
        libraries: what libraries keep for themselves of the allocator's memory.
        device: where all this is.
    """

    parameters: int = 0
    buffers: int = 0
    inputs: int = 0
    gradients: int = 0
    optimizer: OptimizerFootprint | None = None
    trainable: int = 0
    libraries: int = 0
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))

    @property
    def optimizer_state(self) -> int:
        """Bytes of the optimizer's state."""
        return self.optimizer.state_bytes if self.optimizer else 0

    @property
    def total(self) -> int:
        """Everything that is there during forward and backward."""
        return self.parameters + self.buffers + self.inputs + self.gradients + self.optimizer_state + self.libraries


@dataclasses.dataclass(frozen=True)
class Planned:
    """One graph after planning.

    Attributes:
        source: the program as captured.
        before: the same after the rewrites that come before the plan.
        program: the finished program.
        timeline: its memory.
        timeline_before: the memory of `before`.
        records: one per pass.
        costs: seconds and workspace by node name of `before`.
        choice: the plan; None for inference, and where `checkpoint` is not among the passes.
        measured: what a trial run took above what is resident, in bytes; None when none was made.
    """

    source: Program
    before: Program
    program: Program
    timeline: Timeline
    timeline_before: Timeline
    records: tuple[PassRecord, ...]
    costs: Mapping[str, OperatorCost]
    choice: Choice | None = None
    measured: int | None = None


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
    """

    keys: tuple[str, ...]
    planned: tuple[Planned, ...]
    plan: StepPlan
    plain: int
    base: int
    limit: int | None


@dataclasses.dataclass
class Option:
    """One way to plan a step.

    Attributes:
        items: its graphs after these rewrites, before the plan.
        passes: the rewrites that lower the floor and changed something.
        planner: the search, once it was made.
    """

    items: list[Planned]
    passes: tuple[Pass, ...]
    planner: StepPlanner | None = None


@dataclasses.dataclass
class Search:
    """What is kept of a step between two attempts to plan it.

    Attributes:
        keys: fingerprints of its graphs as captured.
        captured: its graphs after the rewrites that come before the plan.
        options: by the names of the rewrites that were tried.
    """

    keys: tuple[str, ...]
    captured: list[Planned]
    options: dict[tuple[str, ...], Option] = dataclasses.field(default_factory=dict)


class Session:
    """Receives the programs of one model from the front door, rewrites and plans them, and keeps the report."""

    def __init__(
        self,
        *,
        budget: Budget | None,
        backend: Engine,
        passes: Sequence[Pass] | None,
        verify: Verification,
        names: Names,
        resident: Resident,
        table: CostTable,
        model_name: str = "",
        plan_seconds: float = 10.0,
    ) -> None:
        self.budget, self.passes, self.verify = budget, passes, verify
        self._engine, self._names = backend, names
        self.resident, self.table = resident, table
        self.model_name, self.plan_seconds = model_name, plan_seconds
        self.notes: list[str] = []
        self.report: Report | None = None
        self.collecting: list[Program] | None = None
        self.whole_step = False  # whether a graph break may be answered by collecting all graphs first
        self._schedules: dict[str, Schedule | None] = {}  # by fingerprint; None: nothing is recomputed
        self._lowered: dict[str, tuple[Pass, ...]] = {}  # by fingerprint: rewrites that lower the floor, as chosen
        self._step: Step | None = None
        self._search_kept: Search | None = None
        self._emitted: dict[str, GraphPeaks] = {}  # by fingerprint: what the engine's own code takes
        # Set by an engine that runs its own code: whether to search for a plan, and bytes that its code takes less
        # than the program's own operations would.
        self.search, self.correction = True, 0
        # Whether what runs is the program itself, so that its timeline is the peak.
        self.exact = backend.exact

    # -- the front door's protocol -------------------------------------------------------------------------------

    @property
    def dry(self) -> bool:
        """Whether graphs are only collected: nothing needs to be compiled."""
        return self.collecting is not None

    def names(self) -> Names:
        """Roles and qualified names of the model's tensors, by `id`."""
        return self._names

    def engine(self) -> Engine:
        """The backend that runs the programs."""
        return self._engine

    def inference(self, program: Program) -> Program:
        """Rewrite an inference program; raise BudgetError when its peak is over the budget."""
        if self.collecting is not None:
            self.collecting.append(program)
            return program
        planned = self.plan_inference(program)
        return planned.program

    def training(self, program: Program, graph_break: bool) -> Program:
        """Rewrite and plan a joint program.

        Raises:
            WholeStepNeeded: there are more graphs to come, and the caller can show all of them.
            BudgetError: no plan keeps the budget.
        """
        if self.collecting is not None:
            self.collecting.append(program)
            return program
        key = fingerprint(program)
        if self.search and key in self._schedules:
            return self._replay(program, self._schedules[key])
        if self.search and (graph_break or self._schedules) and self.whole_step:
            raise WholeStepNeeded
        planned = self.plan_training([program], settled=self.exact)[0]
        if planned.source is program:
            return planned.program
        # Planned for an equal graph that was captured before: a graph is lowered by the capture that made it.
        return self._replay(program, planned.choice.plan.schedule if planned.choice else None)

    # -- planning ------------------------------------------------------------------------------------------------

    def plan_inference(self, program: Program) -> Planned:
        """Rewrite one inference program and check it against the budget."""
        from memopt.passes import INFERENCE

        self._prepare_allocator()
        passes = INFERENCE if self.passes is None else self.passes
        result, records = PassManager(passes, self.verify).run(program)
        program, result = self.table.placed(program), self.table.placed(result)
        costs = self.table.measure_all(result)
        own = getattr(self._engine, "timeline", timeline)  # an engine may lay memory out for itself
        line = own(result, workspace(result, costs))
        before = timeline(program, workspace(program, self.table.measure_all(program)))
        planned = Planned(program, program, result, line, before, records, costs)
        total = self.resident.total + constant_bytes(result)
        limit = self.limit(total + before.peak_bytes)
        planned = self._with_trial(planned)
        measured = planned.measured or 0
        self.report = build_report(
            self, [planned], line.peak_bytes, line.peak_bytes, planned.measured, before.peak_bytes
        )
        if limit is not None and total + max(line.peak_bytes, measured) > self.usable(limit):
            raise self._over(total + max(line.peak_bytes, measured), limit)
        return planned

    def plan_training(self, programs: Sequence[Program], *, settled: bool = True) -> list[Planned]:
        """Plan all graphs of one training step together.

        Args:
            programs: the graphs as captured.
            settled: whether the programs' own timelines decide; else an engine's code has the last word.

        Raises:
            BudgetError: no plan keeps the budget; `minimum_bytes` is the least that one was found for.
        """
        self._prepare_allocator()
        early, late, searched = self._halves()
        keys = tuple(fingerprint(program) for program in programs)
        if self._search_kept is None or self._search_kept.keys != keys:
            self._search_kept = Search(keys, [self._captured(program, early) for program in programs])
        captured = self._search_kept.captured
        plain = self._predicted_peak(captured)
        base = self.resident.total + sum(constant_bytes(item.program) for item in captured)
        limit = self.limit(base + plain)
        room = None if limit is None else self.usable(limit) - base + self.correction
        if searched and self.search:
            planned, plan, lowering = self._choose(self._search_kept, room, late)
            self._lowered.update(dict.fromkeys(keys, lowering))
        else:
            planned = [self._with_trial(item) for item in captured]
            plan = StepPlan((), plain, plain, room is None or plain <= room)
        self._step = Step(keys, tuple(planned), plan, plain, base, limit)
        measured = None
        if all(item.measured is not None for item in planned):
            measured = self._measured_peak(planned, 0)
        self.report = build_report(self, planned, plan.peak_bytes, plan.minimum_bytes, measured, plain, plan.curve)
        if settled and limit is not None:
            fits = plan.feasible and base + max(plan.peak_bytes, measured or 0) <= self.usable(limit)
            needed = base + (max(plan.peak_bytes, measured or 0) if plan.feasible and not fits else plan.minimum_bytes)
            if not fits or self.optimizer_peak() > self.usable(limit):
                raise self._over(max(needed, self.optimizer_peak()), limit)
        for key, item in zip(keys, planned, strict=True) if self.search else ():
            self._schedules[key] = None if item.choice is None else item.choice.plan.schedule
        if self.exact:
            self.forget_search()
        return planned

    def emitted(self, program: Program, peaks: GraphPeaks) -> tuple[int, int | None]:
        """Put on record what an engine's own code for a graph takes.

        Args:
            program: the graph as captured.
            peaks: as predicted from the code.

        Returns:
            Bytes by which the code takes less than the program's own operations, and bytes by which the step exceeds
            the budget (negative when it does not); None without a budget.
        """
        step = self._step
        assert step is not None
        self._emitted[fingerprint(program)] = peaks
        figures = [
            self._emitted.get(key) or peaks_of(item.program, item.timeline)
            for key, item in zip(step.keys, step.planned, strict=True)
        ]
        peak = step_peak(figures)
        saving = step.plan.peak_bytes - peak
        minimum = min(peak, step.plan.minimum_bytes)
        self.report = build_report(self, step.planned, peak, minimum, None, step.plain, step.plan.curve)
        if len(step.keys) == 1:
            self._schedules.pop(step.keys[0], None)  # another attempt may want another plan
        return saving, None if step.limit is None else self.report.peak_bytes - self.usable(step.limit)

    def may_leave(self, graph_break: bool) -> bool:
        """Whether an engine may try its own partition first: a step of one graph, or no budget to be shared."""
        return self.budget is None or not (graph_break or self._schedules)

    @property
    def limit_bytes(self) -> int:
        """The budget of the step that was planned last, in bytes; 0 without one."""
        return (self._step.limit or 0) if self._step else 0

    @property
    def feasible(self) -> bool:
        """Whether the plan of that step keeps the budget, operation by operation."""
        return self._step is None or self._step.plan.feasible

    def hopeless(self, held: int) -> bool:
        """Whether a step that holds `held` bytes between forward and backward is over the budget already."""
        step = self._step
        return step is not None and step.limit is not None and step.base + held > self.usable(step.limit)

    @property
    def recomputes(self) -> bool:
        """Whether the step that was planned last computes anything again."""
        planned = self._step.planned if self._step else ()
        return any(item.choice is not None and item.choice.plan.extra_seconds > 0 for item in planned)

    def note(self, text: str) -> None:
        """Tell the user something, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def one_graph(self) -> bool:
        """Whether the step that was planned last is a single graph, which may be planned again by itself."""
        return self._step is not None and len(self._step.keys) == 1

    def forget_search(self) -> None:
        """Let go of the search: the step is lowered, and what was found is in its schedules."""
        self._search_kept = None

    def withdraw(self, program: Program | None) -> None:
        """Forget what `emitted` put on record: the graph runs as a program after all."""
        if program is not None:
            self._emitted.pop(fingerprint(program), None)

    def _captured(self, source: Program, passes: Sequence[Pass]) -> Planned:
        """A training program after the rewrites that come before the plan."""
        program, records = PassManager(passes, self.verify).run(source)
        program = self.table.placed(program)
        costs, line = self._measured_memory(program)
        return Planned(source, program, program, line, line, records, costs)

    def _measured_memory(self, program: Program) -> tuple[Mapping[str, OperatorCost], Timeline]:
        """What its operators take, and its memory over time."""
        costs = self.table.measure_all(program)
        return costs, timeline(program, workspace(program, costs))

    def _choose(
        self, search: Search, room: int | None, late: Sequence[Pass]
    ) -> tuple[list[Planned], StepPlan, tuple[Pass, ...]]:
        """Choose what to recompute in all graphs, and which of the rewrites that lower the floor to use: the last."""
        captured = search.captured
        options = [self._option(search, ()), self._option(search, self._lowering())]
        lowered, used = options[1].items, options[1].passes
        if not used:
            planned, step = self._search(options[0], room, late)
            return self._recorded(planned, captured, lowered, (), late), step, ()
        plans = [self._planner(option, late, share=0.5).plan(room) for option in options]
        if not acceptable(plans[0]):
            for item in used if len(used) > 1 else ():  # one of them may cost more than it helps
                options.append(self._option(search, [other for other in used if other is not item]))
                plans.append(self._planner(options[-1], late, share=0.25).plan(room))
        index = 0 if acceptable(plans[0]) else cheapest(plans)
        planned, step = self._search(options[index], room, late)
        if not index and room is not None and step.feasible and self._measured_peak(planned, 0) > room:
            index = 1 + cheapest(plans[1:])  # the plan without them does not keep the budget after all
            planned, step = self._search(options[index], room, late)
        chosen = options[index].passes
        others = [plan for number, plan in enumerate(plans) if number != index]
        return self._recorded(planned, captured, lowered, chosen, late), joined(step, others), chosen

    def _option(self, search: Search, passes: Sequence[Pass]) -> Option:
        """The graphs after more rewrites, and those of the rewrites that changed something."""
        names = tuple(item.name for item in passes)
        if names not in search.options:
            items = [self._rewritten(item, passes) for item in search.captured] if passes else search.captured
            changed = {record.name for item in items for record in item.records if record.changes} if passes else set()
            search.options[names] = Option(items, tuple(item for item in passes if item.name in changed))
        return search.options[names]

    def _recorded(
        self,
        planned: Sequence[Planned],
        captured: Sequence[Planned],
        lowered: Sequence[Planned],
        chosen: Sequence[Pass],
        late: Sequence[Pass],
    ) -> list[Planned]:
        """The planned graphs with the records of all their passes, of rewrites that were not chosen too."""
        result = []
        names = {item.name for item in chosen}
        for item, before, after in zip(planned, captured, lowered, strict=True):
            proved = PassManager(chosen, self.verify).run(before.program)[1]
            rest = unused([record for record in after.records if record.name not in names])
            records = (*before.records, *rest, *proved)
            result.append(self._with_late_records(dataclasses.replace(item, records=records), late))
        return result

    def _rewritten(self, item: Planned, passes: Sequence[Pass]) -> Planned:
        """A captured program after more rewrites, not proved yet; its records are those of these alone."""
        program, records = PassManager(passes, False).run(item.program)
        costs, line = self._measured_memory(program)
        return dataclasses.replace(item, before=program, program=program, timeline=line, records=records, costs=costs)

    def _planner(self, option: Option, late: Sequence[Pass], share: float = 1.0) -> StepPlanner:
        after = PassManager(late, False)

        def finish(program: Program) -> tuple[Program, Timeline]:
            finished, _ = after.run(program)
            return finished, self._measured_memory(finished)[1]

        if option.planner is None:
            befores, costs = [item.before for item in option.items], [item.costs for item in option.items]
            option.planner = StepPlanner(befores, costs, finish, seconds=share * self.plan_seconds)
        return option.planner

    def _search(self, option: Option, room: int | None, late: Sequence[Pass]) -> tuple[list[Planned], StepPlan]:
        """Take a plan; plan for less while the measured step is above `room` bytes."""
        target = room
        for _ in range(1 + _TIGHTENINGS):
            step = self._planner(option, late).plan(target)
            planned = [
                self._with_trial(
                    dataclasses.replace(item, program=choice.program, timeline=choice.timeline, choice=choice)
                )
                for item, choice in zip(option.items, step.choices, strict=True)
            ]
            if room is None or target is None or not step.feasible:
                break
            over = self._measured_peak(planned, step.peak_bytes) - room
            if over <= 0:
                break
            log.info("measured step is %d bytes over the budget: planning again", over)
            target -= over + over // 4
        return planned, step

    def _prepare_allocator(self) -> None:
        if self.budget is not None:
            use_expandable_segments(self.resident.device)

    def usable(self, limit: int) -> int:
        """The bytes of a limit that tensors may take: what the allocator loses is left to it."""
        return limit - slack_bytes(limit, self.resident.device)

    def _over(self, needed: int, limit: int) -> BudgetError:
        assert self.report is not None
        return BudgetError(with_slack(needed, self.resident.device), limit, self.report.breakdown)

    def limit(self, unconstrained_bytes: int) -> int | None:
        """The budget in bytes, for a model that takes `unconstrained_bytes` without one."""
        return None if self.budget is None else self.budget.resolve(unconstrained_bytes)

    def _training_passes(self) -> list[Pass]:
        from memopt.passes import TRAINING

        return list(TRAINING if self.passes is None else self.passes)

    def _halves(self) -> tuple[list[Pass], list[Pass], bool]:
        """The training passes before and after the plan, and whether there is one: whether `checkpoint` is a pass."""
        passes = self._training_passes()
        places = [index for index, item in enumerate(passes) if isinstance(item, Checkpoint)]
        if not places:
            return passes, [], False
        late = [item for item in passes[places[0] + 1 :] if not isinstance(item, Checkpoint)]
        return [item for item in passes[: places[0]] if not item.lowers_floor], late, True

    def _lowering(self) -> list[Pass]:
        """The training passes before the plan that lower its floor: used where a plan without them is worse."""
        passes = self._training_passes()
        place = next(index for index, item in enumerate(passes) if isinstance(item, Checkpoint))
        return [item for item in passes[:place] if item.lowers_floor]

    def _replay(self, program: Program, schedule: Schedule | None) -> Program:
        """Apply a plan that was found for an equal program."""
        early, late, _ = self._halves()
        lowering = self._lowered.get(fingerprint(program), ())
        planned = [] if schedule is None else [Checkpoint(schedule=schedule)]
        result, _ = PassManager([*early, *lowering, *planned, *late], False).run(program)
        return result

    def _with_late_records(self, planned: Planned, late: Sequence[Pass]) -> Planned:
        """Run the chosen plan once more through the pass manager, for its records and its evidence."""
        assert planned.choice is not None
        checkpoint = Checkpoint(costs=planned.costs, schedule=planned.choice.plan.schedule)
        program, records = PassManager([checkpoint, *late], self.verify).run(planned.before)
        return dataclasses.replace(planned, program=program, records=(*planned.records, *records))

    # -- measuring -----------------------------------------------------------------------------------------------

    def _with_trial(self, planned: Planned) -> Planned:
        if not self.verify or not self.exact:
            return planned
        try:
            return dataclasses.replace(planned, measured=trial(planned.program))
        except TrialError as error:
            self.note(f"no trial step was measured: {error}")
            return planned

    def _predicted_peak(self, planned: Sequence[Planned]) -> int:
        return step_peak([peaks_of(item.program, item.timeline) for item in planned])

    def _measured_peak(self, planned: Sequence[Planned], default: int) -> int:
        """The peak of a step above what is resident, each graph's own peak measured; `default` where one was not."""
        if any(item.measured is None for item in planned):
            return default
        peaks = []
        for item in planned:
            figures = peaks_of(item.program, item.timeline)
            assert item.measured is not None
            excess = item.measured - item.timeline.peak_bytes
            peaks.append(
                dataclasses.replace(figures, forward=figures.forward + excess, backward=figures.backward + excess)
            )
        return step_peak(peaks)

    def optimizer_peak(self) -> int:
        """The most bytes during `optimizer.step()`: what is resident, all gradients, the optimizer's temporaries."""
        footprint = self.resident.optimizer
        if footprint is None:
            return 0
        held = self.resident.total - self.resident.gradients
        return held + self.resident.trainable + footprint.step_peak_bytes


def constant_bytes(program: Program) -> int:
    """Bytes of the constants that the program itself owns: those that alias no parameter or buffer."""
    known = {
        program.state[entry.name].untyped_storage().data_ptr()
        for entry in program.inputs
        if entry.kind in (InputKind.PARAMETER, InputKind.BUFFER) and entry.name in program.state
    }
    own: dict[int, int] = {}
    for entry, node in zip(program.inputs, program.placeholders, strict=True):
        if entry.kind is InputKind.CONSTANT:
            storage = program.state[entry.name].untyped_storage()
            if storage.data_ptr() not in known:
                own[storage.data_ptr()] = allocated_bytes(storage.nbytes(), node.meta["val"].device)
    return sum(own.values())


def fingerprint(program: Program) -> str:
    """A digest of the graph: operators, arguments, shapes, strides, dtypes and devices."""
    digest = hashlib.sha256()
    for node in program.graph.nodes:
        values = [describe(tensor) for tensor in tensors_of(node)] if node.op == "placeholder" else []
        digest.update(f"{node.name}|{node.target}|{node.args}|{node.kwargs}|{values}\n".encode())
    return digest.hexdigest()


def storage_bytes(tensors: Sequence[Any], device: torch.device | None = None) -> int:
    """Bytes that the distinct storages of the tensors take of their allocators, or would take on `device`."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            found[storage._cdata] = allocated_bytes(storage.nbytes(), device or storage.device)
    return sum(found.values())
