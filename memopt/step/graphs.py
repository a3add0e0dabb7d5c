"""The graphs of one step through the passes, and the records of what these did."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence

from memopt.common.progress import stage
from memopt.evidence import Verification
from memopt.memory.aliasing import of_finished
from memopt.memory.cost.table import CostTable, OperatorCost
from memopt.memory.timeline import Timeline, timeline
from memopt.pass_manager import Pass, PassManager, PassRecord
from memopt.passes.checkpoint import Checkpoint, workspace
from memopt.program import Program
from memopt.solve.schedule import Schedule
from memopt.step.option_scoring import unused
from memopt.step.pass_memo import PassMemo
from memopt.step.planned import Planned
from memopt.step.planner import choice_of
from memopt.step.stages import Stages


class StepGraphs:
    """Rewrites the graphs of a step, and proves the rewrites that a plan is made of.

    Attributes:
        stages: the passes.
        captured: the graphs after the rewrites that come before the plan, in the order of their forward graphs.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        stages: Stages,
        *,
        verify: Verification,
        table: CostTable,
        available: int | None = None,
        kept: PassMemo | None = None,
    ) -> None:
        """Rewrite the programs as far as the plan.

        Args:
            programs: the step's graphs as captured, in the order of their forward graphs.
            stages: the passes.
            verify: how passes are proved.
            table: what operators take.
            available: the most bytes that the proof of a pass may take; None: as `PassManager` has it.
            kept: what passes have made of the programs before.
        """
        self.stages, self._verify, self._table, self._available = stages, verify, table, available
        self._kept = PassMemo() if kept is None else kept
        self._asked: tuple[object, ...] = ()  # what `recorded` was asked last, and told
        self._recorded: list[Planned] = []
        self._early: dict[Program, tuple[PassRecord, ...]] = {}  # by captured program, of the early passes, proved
        once = {program: self._captured(program) for program in dict.fromkeys(programs)}  # blocks may share a graph
        self.captured = [once[program] for program in programs]

    def followed(self, item: Planned, schedule: Schedule, peak: int) -> Planned:
        """A program that was rewritten as far as the plan, in a given order; not proved yet.

        Raises:
            ScheduleError: the order is none of this program's.
        """
        choice = choice_of(item.before, item.costs, schedule, peak, self.finished)
        return dataclasses.replace(item, program=choice.program, timeline=choice.timeline, choice=choice)

    def _captured(self, source: Program) -> Planned:
        """A training program after the rewrites that come before the plan, not proved yet."""
        stage("rewriting the step, measuring its operators")
        program, records = PassManager(self._kept.of(self.stages.early), False).run(source)
        program = self.stages.marked(self.stages.arranged(self._table.placed(program)))
        costs, line = self.memory(program)
        return Planned(source, program, program, line, line, records, costs)

    def rewritten(self, item: Planned, passes: Sequence[Pass]) -> Planned:
        """A captured program after more rewrites, not proved yet; its records are those of these alone."""
        program, records = PassManager(self._kept.of(passes), False).run(item.program)
        program = self.stages.marked(program)
        costs, line = self.memory(program)
        return dataclasses.replace(item, before=program, program=program, timeline=line, records=records, costs=costs)

    def finished(self, program: Program) -> tuple[Program, Timeline]:
        """A planned program after the passes that come after the plan, not proved yet, and its memory over time."""
        finished, _ = PassManager(self._kept.of(self.stages.late), False).run(program)
        return finished, self.memory(finished)[1]

    def memory(self, program: Program) -> tuple[Mapping[str, OperatorCost], Timeline]:
        """What its operators take, and its memory over time."""
        costs: Mapping[str, OperatorCost] = self._table.measure_all(program)
        if self.stages.fusion is not None:
            costs = self.stages.fusion.costs(program, costs)
        return costs, timeline(program, workspace(program, costs), of_finished(program))

    def recorded(self, planned: Sequence[Planned], lowered: Sequence[Planned], chosen: Sequence[Pass]) -> list[Planned]:
        """The graphs with the records of all their passes, proved; of rewrites that were not chosen, too.

        Args:
            planned: the captured graphs, planned or as they are after the rewrites that were chosen.
            lowered: the same after all rewrites that were looked at.
            chosen: which of these were.
        """
        asked = (*planned, *lowered, *chosen)
        if len(asked) != len(self._asked) or any(map(operator.is_not, asked, self._asked)):
            stage("proving the rewrites")
            self._recorded = [
                self._with_late_records(dataclasses.replace(item, records=records))
                for item, records in zip(planned, self._records_before(lowered, chosen), strict=True)
            ]
            self._asked = asked
        return list(self._recorded)

    def _records_before(self, lowered: Sequence[Planned], chosen: Sequence[Pass]) -> list[tuple[PassRecord, ...]]:
        """Per graph, the records of all passes before the plan, those that were not chosen too."""
        names = {item.name for item in chosen}
        result = []
        for before, after in zip(self.captured, lowered, strict=True):
            if before.source not in self._early:
                self._early[before.source] = self._proving(self.stages.early).run(before.source)[1]
            early = self._early[before.source]
            proved = self._proving(chosen).run(before.program, early)[1]
            others = () if after is before else after.records
            rest = unused([record for record in others if record.name not in names])
            result.append((*early, *rest, *proved))
        return result

    def _with_late_records(self, planned: Planned) -> Planned:
        """Run the chosen plan once more through the pass manager, for its records and its evidence."""
        if planned.choice is None:
            return planned
        checkpoint = Checkpoint(costs=planned.costs, schedule=planned.choice.plan.schedule)
        manager = self._proving(self.stages.late, checkpoint)
        program, records = manager.run(planned.before, planned.records)
        return dataclasses.replace(planned, program=program, records=(*planned.records, *records))

    def _proving(self, passes: Sequence[Pass], *first: Pass) -> PassManager:
        """What proves these passes and puts them on record; what they made of a program is not made again."""
        return PassManager([*first, *self._kept.of(passes)], self._verify, record=True, available=self._available)
