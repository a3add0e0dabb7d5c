"""The ways to plan one step: its graphs after some of the rewrites that lower the minimum, each with its own search."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

from memopt.common.phases import phase
from memopt.common.progress import stage
from memopt.pass_manager import Pass
from memopt.solve.recompute import Curve
from memopt.step.encode_step import Lowering
from memopt.step.graphs import StepGraphs
from memopt.step.planned import Planned, fingerprint, measured_peak
from memopt.step.planner import Choice, StepPlan, StepPlanner
from memopt.step.solver_pool import Begun, Searches
from memopt.step.trade_offs import jobs_of, lowerings_of

log = logging.getLogger("memopt")

# How often a plan whose measured step went over the limit is tightened before the limit is called infeasible.
_TIGHTENINGS = 3
# A plan during which memory ran out is planned again for limit / STARVED less.
STARVED = 8
# Where an engine's code has the last word, a search is given so many seconds for each operation, and at least so many:
# of 24 layers' 1,500 operations it found what twice as long did, or came within 0.03 % of the step's time of that.
# Where nothing that it finds keeps the limit, it is given all of its time.
_BRIEF, _BRIEFEST = 0.001, 0.5


@dataclasses.dataclass
class Option:
    """One way to plan the step: its graphs after more rewrites, and the search, once it was made."""

    items: list[Planned]
    passes: tuple[Pass, ...]
    planner: StepPlanner | None = None
    lowerings: list[Lowering] | None = None  # its graphs as numbers, once a search was begun
    begun: Begun | None = None


class Options:
    """Every way that was asked for, rewritten once and searched once.

    Attributes:
        seconds: time for one search, all graphs together.
        brief: whether searches are given less, by the number of operations.
        starved: whether memory ran out in a step that was tried.
    """

    def __init__(self, graphs: StepGraphs, attempt: Callable[[Planned], Planned], seconds: float) -> None:
        """Nothing is rewritten yet; `attempt` and `seconds` are those of `StepSearch`."""
        self.seconds, self.starved = seconds, False
        self.brief = graphs.stages.fusion is not None
        self._graphs, self._attempt = graphs, attempt
        self._made: dict[tuple[str, ...], Option] = {}

    def of(self, passes: Sequence[Pass]) -> Option:
        """The graphs after more rewrites, and those of the rewrites that changed something."""
        names = tuple(item.key for item in passes)
        if names not in self._made:
            with phase("rewriting"):
                captured = self._graphs.captured
                items = [self._graphs.rewritten(item, passes) for item in captured] if passes else captured
            changed = {record.name for item in items for record in item.records if record.changes} if passes else set()
            used = tuple(item for item in passes if item.name in changed)
            self._made[names] = option = Option(items, used)
            if used:  # asked for without those that change nothing, it is the same
                self._made.setdefault(tuple(item.key for item in used), option)
        return self._made[names]

    def base_seconds(self, chosen: Sequence[Pass]) -> float:
        """The step's time without recomputation; of several rewrites together, about: as each by itself changes it."""
        names = tuple(item.key for item in chosen)
        if len(chosen) < 2 or names in self._made:
            return sum(cost.seconds for item in self.of(chosen).items for cost in item.costs.values())
        plain = self.base_seconds(())
        return plain + sum(self.base_seconds((item,)) - plain for item in chosen)

    def begin(self, searches: Searches, options: Sequence[Option], share: float) -> None:
        """Begin to search the trade-offs of options, each in a share of the time."""
        for option in options:
            if option.planner is None and option.begun is None:
                with phase("searching"):
                    costs = [item.costs for item in option.items]
                    option.lowerings = lowerings_of([item.before for item in option.items], costs)
                    option.begun = searches.begin(jobs_of(option.lowerings, self._seconds(option.lowerings, share)))

    def planners(self, searches: Searches, options: Sequence[Option], share: float) -> list[StepPlanner]:
        """The searched trade-offs of several options, each in a share of the time, side by side."""
        self.begin(searches, options, share)
        found = []
        for option in sorted(options, key=lambda option: option.begun is not None and option.begun.apart):
            if option.planner is None and option.begun is not None:
                stage(f"searching, {share * self.seconds:.0f} s at most")
                with phase("searching"):
                    option.planner = self.planned_by(option, None, option.lowerings, option.begun.curves())
                option.begun = None
        for option in options:
            assert option.planner is not None
            found.append(option.planner)
        return found

    def planner(self, option: Option) -> StepPlanner:
        """The searched trade-off of one option, in all of the time."""
        with Searches() as searches:
            return self.planners(searches, [option], 1.0)[0]

    def planned_by(
        self,
        option: Option,
        search: Callable[[Lowering, float], Curve] | None,
        lowerings: Sequence[Lowering] | None = None,
        curves: Sequence[Curve] | None = None,
    ) -> StepPlanner:
        """A planner for an option: with a search of its own, or from curves that were found for `lowerings`."""
        befores, costs = [item.before for item in option.items], [item.costs for item in option.items]
        exact = self._graphs.stages.fusion is None
        alike = [fingerprint(item.source) for item in option.items]
        return StepPlanner(
            befores,
            costs,
            self._graphs.finished,
            exact=exact,
            search=search,
            lowerings=lowerings,
            curves=curves,
            alike=alike,
        )

    def search_at_length(self) -> None:
        """Search all of them anew, in all of the time."""
        self.brief = False
        for option in self._made.values():
            option.planner = option.lowerings = option.begun = None

    def plan_within(self, option: Option, limit: int | None) -> tuple[list[Planned], StepPlan]:
        """Take a plan; plan for less while the measured step is above `limit` bytes, or memory runs out in it.

        Of a step that stays above it the deepest plan is returned, infeasible, its measured peak the least that is
        known to be enough.
        """
        target = limit
        starved: tuple[list[Planned], StepPlan] | None = None
        for left in reversed(range(1 + _TIGHTENINGS)):
            step = self.planner(option).plan(target)
            if starved is not None and (not step.feasible or step.peak_bytes >= starved[1].peak_bytes):
                return starved  # less is not to be had: what runs may have more memory than the trial had
            stage("taking a trial step")
            planned = self._attempted(option.items, step.choices)
            if step.feasible and any(item.ran_out for item in planned):
                starved, self.starved = (planned, step), True
                target = step.peak_bytes - step.peak_bytes // STARVED
                log.info("memory ran out in a step of %d bytes: planning again", step.peak_bytes)
                continue
            if limit is None or target is None:
                break
            taken = max(step.peak_bytes, measured_peak(planned, step.peak_bytes))
            if taken <= limit:  # though less was asked for
                return planned, dataclasses.replace(step, feasible=True)
            if not step.feasible:
                return planned, dataclasses.replace(step, minimum_bytes=max(step.minimum_bytes, taken))
            log.info("measured step is %d bytes over the budget: planning again", taken - limit)
            target = target - (taken - limit) - (taken - limit) // 4 if left > 1 else 0
        return planned, step

    def _attempted(self, items: Sequence[Planned], choices: Sequence[Choice]) -> list[Planned]:
        """The graphs as chosen, each run once: what runs several times in a step takes as much each time."""
        tried: dict[int, Planned] = {}
        planned = []
        for item, choice in zip(items, choices, strict=True):
            chosen = dataclasses.replace(item, program=choice.program, timeline=choice.timeline, choice=choice)
            if id(choice) in tried:
                same = tried[id(choice)]
                chosen = dataclasses.replace(chosen, measured=same.measured, failure=same.failure, ran_out=same.ran_out)
            else:
                chosen = tried[id(choice)] = self._attempt(chosen)
            planned.append(chosen)
        return planned

    def _seconds(self, lowerings: Sequence[Lowering], share: float) -> float:
        operations = sum(len(lowering.operations) for lowering in lowerings)
        brief = max(_BRIEFEST, _BRIEF * operations) if self.brief else self.seconds
        return min(share * self.seconds, brief)
