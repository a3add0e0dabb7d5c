"""The search for a step's plan: what to recompute, and which rewrites that reduce the minimum to use."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence

from memopt.common.progress import stage
from memopt.pass_manager import Pass
from memopt.solve.schedule import ScheduleError
from memopt.step.graph_peaks import scheduled_peaks, step_peak
from memopt.step.graphs import StepGraphs
from memopt.step.option_scoring import (
    WORTH_OF_CUT,
    WORTH_OF_OTHERS,
    acceptable,
    beside,
    cheapest,
    deeper,
    joined,
    otherwise,
)
from memopt.step.options import STARVED, Option, Options
from memopt.step.plan_store import PlanStore, StoredPlan, key_of
from memopt.step.plan_transfer import TransferredPlan, carried_curve
from memopt.step.planned import Planned, measured_peak, predicted_peak
from memopt.step.planner import StepPlan
from memopt.step.search_result import SearchResult, stored_plan
from memopt.step.solver_pool import Searches

log = logging.getLogger("memopt")

# Parts of a search's time: for the first two options, and for each further one.
_FIRST, _FURTHER = 0.5, 0.25


class StepSearch:
    """Plans one step for any number of limits: rewrites and searched curves are kept from one to the next."""

    def __init__(
        self,
        graphs: StepGraphs,
        *,
        attempt: Callable[[Planned], Planned],
        seconds: float,
    ) -> None:
        """Nothing is searched yet.

        Args:
            graphs: the step's graphs, rewritten as far as the plan.
            attempt: runs a planned graph once, where that can be done, and fills in what it took.
            seconds: time for one search, all graphs together.
        """
        self._attempt = attempt
        self.stages, self.captured = graphs.stages, graphs.captured
        self.searches = 0
        self._graphs, self._options = graphs, Options(graphs, attempt, seconds)
        self._store = PlanStore()
        self._known = False  # whether something was found for the step itself, with all plans that there are

    @property
    def seconds(self) -> float:
        """Time for one search, all graphs together; who sets it gives the next ones less, or more."""
        return self._options.seconds

    @seconds.setter
    def seconds(self, seconds: float) -> None:
        self._options.seconds = seconds

    def plan(self, limit: int | None, carried: TransferredPlan | None = None, *, prove: bool = True) -> SearchResult:
        """Choose what to recompute in all graphs, and which of the rewrites that reduce the minimum to use: the last.

        A choice that was made before for an equal step is found again on disk, and judged anew.

        Args:
            limit: bytes above what is resident; None: recompute only what costs no time.
            carried: what was found for the same step at another size: taken over where it keeps the limit, as long as
                nothing was found for this one.
            prove: whether to prove what was chosen; else that is left to `prove`.
        """
        found = self._planned(limit, carried)
        return self.prove(found) if prove else found

    def prove(self, found: SearchResult) -> SearchResult:
        """What was chosen, with the records of all its passes, proved."""
        if found.proved:
            return found
        searched = any(item.choice is not None for item in found.planned)
        every = self._options.of(self.stages.lowering).items if searched or found.lowering else self.captured
        return dataclasses.replace(
            found, planned=self._graphs.recorded(found.planned, every, found.lowering), proved=True
        )

    def _planned(self, limit: int | None, carried: TransferredPlan | None) -> SearchResult:
        passes = (*self.stages.early, *self.stages.lowering, *self.stages.late)
        key, deepest = (key_of(self.captured, passes, size, self.seconds) for size in (limit, 0))
        stored = self._store.get(key)
        found = None if stored is None else self.from_store(stored, limit)
        if found is None and limit is not None and limit <= 0 and self.stages.fusion is not None:
            found = self._named(deepest)  # a search would find it again, or another one, whose code may take more
            if found is not None:
                return found
        if found is None and carried is not None and not self._known:
            found = self._carried_over(carried, limit)
            if found is not None:
                return found
        self._known = True
        if found is None:
            self._options.starved = False
            found = self._searched(limit)
            fits = found.plan.feasible and (limit is None or measured_peak(found.planned, 0) <= limit)
            if fits and not self._options.starved:  # memory that was short today may be there tomorrow
                self._store.put(key, stored_plan(found))
            elif not fits and limit is not None:
                found = self._promised(deepest, found, limit)
        elif any(item.ran_out for item in found.planned):
            tighter = self._searched(found.plan.peak_bytes - found.plan.peak_bytes // STARVED)
            found = tighter if tighter.plan.feasible else found
        return found

    def _promised(self, key: str, found: SearchResult, limit: int) -> SearchResult:
        """What some search has named as the least keeps it later, too, though a search in less time may not find it.

        It is kept under the key of a limit of nothing. Where that is more than the limit it is still the deepest plan,
        and where an engine's code has the last word the one that was named by its code: code of another plan, deeper
        by the search's figures, may take more.
        """
        stored, least = self._store.get(key), found.plan.peak_bytes
        taken = max(least, measured_peak(found.planned, 0))
        by_code = self.stages.fusion is not None
        if stored is not None and (by_code or stored.peak_bytes <= limit or stored.peak_bytes < taken):
            known = self._named(key)
            needs = taken if known is None else known.plan.minimum_bytes
            if known is not None and needs <= limit:
                return dataclasses.replace(known, plan=dataclasses.replace(known.plan, feasible=True))
            if known is not None and (by_code or needs < taken):
                return known
        if taken <= found.plan.minimum_bytes and (stored is None or least < stored.peak_bytes):
            self._store.put(key, stored_plan(found))
        return found

    def _named(self, key: str) -> SearchResult | None:
        """The deepest plan that was named, infeasible, with what it takes as its least; None where there is none."""
        stored = self._store.get(key)
        known = None if stored is None else self.from_store(stored, None)
        if known is None:
            return None
        least = max(known.plan.minimum_bytes, known.plan.peak_bytes, measured_peak(known.planned, 0))
        return dataclasses.replace(known, plan=dataclasses.replace(known.plan, feasible=False, minimum_bytes=least))

    def lowerings(self, limit: int | None = None) -> list[tuple[Pass, ...]]:
        """What of the rewrites that reduce the minimum may be used: all, or as `beside` has it; in order of time.

        That is the step's time without recomputation, and what changes nothing is left out.

        Args:
            limit: bytes above what is resident; what takes clearly longer than a plan within them is left out.
        """
        every = self._options.of(self.stages.lowering)
        used = every.passes
        found = sorted(filter(None, [used, *self._beside(used)]), key=self._options.base_seconds)
        if limit is None or not found:
            return found
        with Searches() as searches:
            planners = self._options.planners(searches, [self._options.of(()), every], _FIRST)
        plans = [planner.outlook(limit) for planner in planners]
        most = min((plan.seconds for plan in plans if plan.feasible), default=math.inf)
        return [chosen for chosen in found if self._options.base_seconds(chosen) <= most * (1 + WORTH_OF_CUT)]

    def all_lowering(self) -> tuple[Pass, ...]:
        """Every rewrite that reduces the minimum, and changes something."""
        return self._options.of(self.stages.lowering).passes

    def _beside(self, used: Sequence[Pass]) -> list[tuple[Pass, ...]]:
        """What to use of rewrites beside all of them: fewer, or some set otherwise where that can save something."""
        dear = self._options.base_seconds(used) > (1 + WORTH_OF_OTHERS) * self._options.base_seconds(())
        return [*beside(used), *(otherwise(used) if dear else [])]

    def unplanned(self, chosen: Sequence[Pass]) -> list[Planned]:
        """The graphs with these of the rewrites that lower the minimum, not proved yet, and with nothing recomputed."""
        return self._options.of(chosen).items

    def from_store(self, stored: StoredPlan, limit: int | None) -> SearchResult | None:
        """The step with a plan that was found before; None where it is for other graphs, or over the limit."""
        chosen = self.stages.called(stored.lowering)
        if chosen is None or len(stored.schedules) != len(self.captured):
            return None
        planned = []
        try:
            for item, schedule, peak in zip(
                self._options.of(chosen).items, stored.schedules, stored.peaks, strict=True
            ):
                planned.append(self._attempt(self._graphs.followed(item, schedule, peak)))
        except ScheduleError as error:
            log.info("a stored plan is not used: %s", error)
            return None
        choices = tuple(item.choice for item in planned if item.choice is not None)
        if self.stages.fusion is None:
            peak = predicted_peak(planned)
        else:  # as when it was found: by the search's own figures
            befores = [item.before for item in planned]
            peak = step_peak(
                [
                    scheduled_peaks(before, choice.lowering, choice.plan.schedule)
                    for before, choice in zip(befores, choices, strict=True)
                ]
            )
        if peak != stored.peak_bytes:
            return None
        if limit is not None and max(peak, measured_peak(planned, 0)) > limit:
            return None
        seconds, extra = (
            sum(getattr(choice.plan, name) for choice in choices) for name in ("seconds", "extra_seconds")
        )
        minimum = min(peak, stored.minimum_bytes)
        plan = StepPlan(choices, peak, minimum, True, seconds, extra, stored.curve)
        return SearchResult(planned, plan, chosen)

    def _carried_over(self, carried: TransferredPlan, limit: int | None) -> SearchResult | None:
        """The step with a plan of another size; None where that is none of this size, or not within the limit."""
        chosen = self.stages.called(carried.lowering)
        if chosen is None or len(carried.schedules) != len(self.captured):
            return None
        option = self._options.of(chosen)
        known = iter(zip(carried.operations, carried.schedules, strict=True))
        stage("carrying a plan over")
        try:
            planner = self._options.planned_by(option, lambda lowering, seconds: carried_curve(lowering, *next(known)))
        except ScheduleError as error:
            log.info("a plan of another size is not used: %s", error)
            return None
        if not planner.outlook(limit).feasible:  # a step of it would be taken over the budget
            return None
        planned, step = self._options.plan_within(Option(option.items, chosen, planner), limit)
        if not step.feasible or (limit is not None and measured_peak(planned, 0) > limit):
            return None
        return SearchResult(planned, step, chosen)

    def _searched(self, limit: int | None) -> SearchResult:
        self.searches += 1
        found = self._chosen(limit)
        if self._options.brief and (found is None or not found.plan.feasible):
            self._options.search_at_length()
            found = self._chosen(limit)
        assert found is not None
        return found

    def _chosen(self, limit: int | None) -> SearchResult | None:
        """The best plan of all options; None where a brief search finds none."""
        plain = self._options.of(())
        with Searches() as searches:
            if self._options.brief:  # it is searched while the rewrites are made
                self._options.begin(searches, [plain], _FIRST)
            options = [plain, self._options.of(self.stages.lowering)]
            used = options[1].passes
            if not used:
                self._options.planners(searches, [plain], 1.0)
                planned, step = self._options.plan_within(plain, limit)
                return self._deepest(SearchResult(planned, step, ()), used, limit)
            without = self._beside(used)
            self._options.begin(searches, options, _FIRST)
            if searches.more(len(without)):  # begun now, they take no time of their own
                self._options.begin(searches, [self._options.of(passes) for passes in without], _FURTHER)
            plans = [planner.outlook(limit) for planner in self._options.planners(searches, options, _FIRST)]
            if not acceptable(plans[0]) and without:  # one of them may cost more than it helps
                further = [self._options.of(passes) for passes in without]
                plans += [planner.outlook(limit) for planner in self._options.planners(searches, further, _FURTHER)]
                options += further
        if self._options.brief and not any(plan.feasible for plan in plans):
            return None
        index = 0 if acceptable(plans[0]) else cheapest(plans)
        planned, step = self._options.plan_within(options[index], limit)
        if not index and not step.feasible and plans[0].feasible:
            index = 1 + cheapest(plans[1:])  # the plan without them does not keep the budget after all
            planned, step = self._options.plan_within(options[index], limit)
        deepest = min(range(len(plans)), key=lambda number: plans[number].minimum_bytes)
        if not step.feasible and index != deepest:
            index = deepest
            planned, step = self._options.plan_within(options[index], limit)
        chosen = options[index].passes
        others = [plan for number, plan in enumerate(plans) if number != index]
        return self._deepest(SearchResult(planned, joined(step, others), chosen), used, limit)

    def _deepest(self, found: SearchResult, used: Sequence[Pass], limit: int | None) -> SearchResult:
        """What was found, or less where that keeps no limit: rewrites set deeper, also such as change nothing else."""
        if found.plan.feasible or self._options.brief:
            return found
        idle = [item.deeper for item in self.stages.lowering if item not in used and item.deeper is not None]
        below = (*(deeper(found.lowering) or found.lowering), *idle)
        if self._options.of(below).passes == tuple(found.lowering):
            return found
        return self._lower_of(found, below, limit)

    def _lower_of(self, found: SearchResult, chosen: Sequence[Pass], limit: int | None) -> SearchResult:
        """What was found and keeps no limit, or a plan with these rewrites where that takes less."""
        with Searches() as searches:
            option = self._options.of(chosen)
            self._options.planners(searches, [option], _FURTHER)
        planned, step = self._options.plan_within(option, limit)
        if not step.feasible and step.minimum_bytes >= found.plan.minimum_bytes:
            return found
        return SearchResult(planned, joined(step, [found.plan]), option.passes)
