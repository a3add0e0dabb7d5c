"""What the graphs of one model were planned for: they are lowered by that when torch hands them over again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from memopt.pass_manager import Pass
from memopt.program import Program
from memopt.solve.schedule import Schedule
from memopt.step.planned import Planned
from memopt.step.stages import Stages, replay

# Whether a graph runs operator by operator, or as code of the engine; its fingerprint.
Known = tuple[bool, str]


class _Plan(NamedTuple):
    """What one graph was planned for.

    Attributes:
        schedule: of the graph; None: nothing is recomputed.
        together: all graphs of the step that it was planned in.
    """

    schedule: Schedule | None
    together: tuple[Known, ...]


class KnownPlans:
    """Schedules of graphs, and the rewrites that they are made with."""

    def __init__(self) -> None:
        """Nothing is planned yet."""
        self._plans: dict[Known, _Plan] = {}
        self._made_with: dict[Known, tuple[Stages, tuple[Pass, ...]]] = {}

    def __contains__(self, known: Known) -> bool:
        return known in self._plans

    def __len__(self) -> int:
        return len(self._plans)

    def made_with(self, graphs: Iterable[Known], stages: Stages, lowering: tuple[Pass, ...]) -> None:
        """Keep what the latest plan of these graphs was made with, whether it stands or not."""
        self._made_with.update(dict.fromkeys(graphs, (stages, lowering)))

    def keep(self, graphs: Iterable[Known], planned: Iterable[Planned]) -> None:
        """Keep the schedules of a plan that stands."""
        together = tuple(graphs)
        for known, item in zip(together, planned, strict=True):
            self._plans[known] = _Plan(None if item.choice is None else item.choice.plan.schedule, together)

    def serves(self, known: Known, together: Iterable[Known]) -> bool:
        """Whether a graph is planned, and that for a step of these graphs, in any order.

        What one saves the others lack: a plan beside a smaller graph is none for two calls of its own.
        """
        plan = self._plans.get(known)
        return plan is not None and sorted(plan.together) == sorted(together)

    def forget(self, graphs: Iterable[Known]) -> None:
        """Let these graphs be planned anew."""
        for known in graphs:
            self._plans.pop(known, None)

    def clear(self) -> None:
        """Let all graphs be planned anew."""
        self._plans.clear()

    def replayed(self, known: Known, program: Program, stages: Stages) -> Program:
        """The graph as it was planned; with `stages` alone where it was not."""
        plan = self._plans.get(known)
        return self.replayed_by(known, program, stages, None if plan is None else plan.schedule)

    def replayed_by(self, known: Known, program: Program, stages: Stages, schedule: Schedule | None) -> Program:
        """The graph with this schedule, made with what its latest plan was made with."""
        made, lowering = self._made_with.get(known, (stages, ()))
        return replay(program, made, lowering, schedule)
