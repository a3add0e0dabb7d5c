"""Choose what to recompute, for all graphs of one training step together, so that the whole step keeps a limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from memopt.memory.timeline import Timeline
from memopt.program import Program
from memopt.solve.beside import curve_beside
from memopt.solve.check import check
from memopt.solve.in_place import in_place_floor
from memopt.solve.phase_peaks import phase_peaks
from memopt.solve.recompute import Curve, Plan
from memopt.solve.schedule import Schedule, simulate
from memopt.step.curve import CurvePoint, step_curve
from memopt.step.encode_step import Cost, Lowering, apply_schedule, lower
from memopt.step.graph_peaks import GraphPeaks, graph_peaks, held_beside, peaks_of, step_peak
from memopt.step.trade_offs import curves_of, lowerings_of, peaks_on

# Rounds in which the solver's limit is corrected by what the finished program really needs.
_ROUNDS = 4
# Limits at which plans of several graphs are combined for the step's curve.
_COMBINED = 24
# How often each graph's plan is looked at for the step's least peak.
_SWEEPS = 4
# The share of the search's time in which the floor is looked for once more, where no plan keeps the limit.
_SINKING = 0.1
# The same for plans that save less of a single graph.
_SAVING = 0.5
# The share of the least peak from which on it may be lowered by as much for its own sake.
_MUCH = 0.03


@dataclasses.dataclass(frozen=True)
class Choice:
    """The plan of one graph.

    Attributes:
        lowering: the graph in numbers.
        plan: the schedule taken, with the solver's own figures.
        curve: everything that the solver found.
        program: the planned program, finished.
        timeline: the finished program's memory.
    """

    lowering: Lowering
    plan: Plan
    curve: Curve
    program: Program
    timeline: Timeline


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The plans of all graphs of a step.

    Attributes:
        choices: one per graph; none in an outlook, and where nothing was searched.
        peak_bytes: the step's peak above what is resident.
        minimum_bytes: the least such peak that was found.
        feasible: whether the peak keeps the limit.
        seconds: predicted time of forward and backward.
        extra_seconds: how much of it goes into recomputing.
        curve: what more or less memory would cost, in bytes above what is resident; empty where nothing was searched.
    """

    choices: tuple[Choice, ...]
    peak_bytes: int
    minimum_bytes: int
    feasible: bool
    seconds: float = 0.0
    extra_seconds: float = 0.0
    curve: tuple[CurvePoint, ...] = ()


def choice_of(program: Program, cost: Mapping[str, Cost], schedule: Schedule, peak: int, finish: Finish) -> Choice:
    """The plan of one graph that follows a schedule found elsewhere.

    Args:
        program: the training program.
        cost: seconds and workspace by node name.
        schedule: an order of execution, by numbers of the program's operations.
        peak: bytes that the schedule claims to peak at.
        finish: what happens to the planned program afterwards, and the resulting timeline.

    Raises:
        ScheduleError: the schedule is none of this program's, or peaks elsewhere.
    """
    lowering = lower(program, cost)
    check(lowering.problem, schedule, peak)
    seconds = simulate(lowering.problem, schedule).seconds
    plan = Plan(schedule, peak, seconds, seconds - lowering.problem.base_seconds, peak, True)
    finished, line = finish(apply_schedule(program, lowering, schedule))
    return Choice(lowering, plan, Curve((plan,)), finished, line)


Finish = Callable[[Program], tuple[Program, Timeline]]


def plan_step(
    programs: Sequence[Program],
    costs: Sequence[Mapping[str, Cost]],
    limit: int | None,
    finish: Finish,
    *,
    seconds: float = 20.0,
) -> StepPlan:
    """Choose a plan for each graph so that the step keeps the limit at the least time: `StepPlanner` for one limit."""
    return StepPlanner(programs, costs, finish, seconds=seconds).plan(limit)


class StepPlanner:
    """Plans one step at any number of limits: the search is made once, and its curves are kept."""

    def __init__(
        self,
        programs: Sequence[Program],
        costs: Sequence[Mapping[str, Cost]],
        finish: Finish,
        *,
        seconds: float = 20.0,
        search: Callable[[Lowering, float], Curve] | None = None,
        exact: bool = True,
        lowerings: Sequence[Lowering] | None = None,
        curves: Sequence[Curve] | None = None,
        alike: Sequence[object] | None = None,
    ) -> None:
        """Search the trade-off of every graph.

        Args:
            programs: the training programs of the step, in the order of their forward graphs.
            costs: per program, seconds and workspace by node name.
            finish: what happens to a planned program afterwards (in-place conversion, say), and the resulting timeline.
            seconds: time for the search, all graphs together.
            search: finds the trade-off of one graph in so many seconds; None: the solver's own search.
            exact: whether peaks are those of finished programs; else the search's own figures are taken, where an
                engine's code has the last word anyway.
            lowerings: the programs as numbers, where that is made already (`lowerings_of`).
            curves: their trade-offs, where these were searched already (`jobs_of`).
            alike: of each program what equal ones have in common: these run by one plan, as they are told apart by
                nothing else, or are one graph that runs several times. None: each has a plan of its own.
        """
        self.programs, self.finish, self.exact = programs, finish, exact
        marks = list(range(len(programs)) if alike is None else alike)
        self._first = [marks.index(mark) for mark in marks]
        own = list(lowerings_of(programs, costs) if lowerings is None else lowerings)
        found = list(curves_of(own, seconds, search) if curves is None else curves)
        self.lowerings, self.curves = [own[i] for i in self._first], [found[i] for i in self._first]
        self.figures = [
            graph_peaks(program, lowering, peaks_on(found, lowering))
            for program, lowering, found in zip(programs, self.lowerings, self.curves, strict=True)
        ]
        self.built: dict[tuple[int, int], Choice] = {}
        self.peaks: dict[tuple[int, ...], int] = {}  # of finished steps
        self._deepest: list[int] | None = None
        self._seconds, self._sunk, self._saved_less = seconds, False, False
        # Peaks by the search's figures, by what is held beside the graphs and the number of each graph's plan.
        self._counted: dict[tuple[int, ...], int] = {}

    def plan(self, limit: int | None) -> StepPlan:
        """Choose a plan for each graph so that the step keeps the limit at the least time.

        The search does not know how programs are finished, so its limit is corrected until the finished ones just fit.

        Args:
            limit: bytes above what is resident; None: recompute only what costs no time.
        """
        picked, outlook = self._picked(limit)
        return dataclasses.replace(outlook, choices=tuple(self.build(picked)))

    def outlook(self, limit: int | None) -> StepPlan:
        """What `plan` would choose, without the programs."""
        return self._picked(limit)[1]

    def _picked(self, limit: int | None) -> tuple[Sequence[int], StepPlan]:
        best = self.deepest()
        minimum = self.peak(best)
        if limit is None:
            best = self.free()
            return best, self._result(best, min(minimum, self.peak(best)), True)
        feasible = minimum <= limit
        target = limit
        for _ in range(_ROUNDS):
            picked = self.pick(target)
            if picked is None:
                target = limit + (limit - target) // 2 if target > limit else target + max(1, limit // 10)
                continue
            peak = self.peak(picked)
            minimum = min(minimum, peak)
            if peak <= limit and (not feasible or self.seconds(picked) < self.seconds(best)):
                best, feasible = picked, True
            if limit * 0.98 <= peak <= limit:
                break
            target += limit - peak
        if not feasible and (self._saves_less() or self._sinks(minimum, limit)):
            return self._picked(limit)
        return best, self._result(best, minimum, feasible)

    def _saves_less(self) -> bool:
        """Whether plans that save less lower the peak of a single graph, beside what is held before its backward.

        They are looked for once, where no plan keeps the limit: the least peak of its own is not the least there.
        """
        if len(self.curves) > 1 or not held_beside()[0] or self._saved_less:
            return False
        self._saved_less, before = True, self._solver_peak(self.deepest())
        (lowering,), (known,) = self.lowerings, self.curves
        found = curve_beside(lowering.problem, lowering.kernels, seconds=self._seconds * _SAVING)
        self._put_curve(
            0, Curve((*known.points, *found.points), (*peaks_on(known, lowering), *peaks_on(found, lowering)))
        )
        if self._solver_peak(self.deepest()) < before:
            return True
        self._put_curve(0, known)
        return False

    def _sinks(self, minimum: int, limit: int) -> bool:
        """Whether orders found with results in the memory of what they are made of lower the step's least peak.

        They do by one result at most: where that neither reaches the limit nor is much, they are not looked for.
        """
        sizes = [lowering.problem.sizes[result] for lowering in self.lowerings for result, _ in lowering.over]
        most = max(sizes, default=0)
        if self._sunk or (minimum - limit > most and most < minimum * _MUCH):
            return False
        self._sunk, best = True, self.deepest()
        before = least = self.peak(best)
        graphs = list(dict.fromkeys(self._first))
        for graph in graphs:
            lowering, found = self.lowerings[graph], self.curves[graph]
            plan = in_place_floor(lowering.problem, lowering.over, seconds=self._seconds * _SINKING / len(graphs))
            if plan is None or plan.schedule in [point.schedule for point in found.points]:
                continue
            added = phase_peaks(lowering.problem, plan.schedule, lowering.kernels)
            self._put_curve(graph, Curve((*found.points, plan), (*peaks_on(found, lowering), added)))
            lower = self._with(best, graph, len(found.points))
            if self.peak(lower) < least:
                best, least = lower, self.peak(lower)
                continue
            self._put_curve(graph, found)
            self.built.pop((graph, len(found.points)), None)
            self.peaks.pop(tuple(lower), None)
        self._deepest = best
        return least < before

    def _put_curve(self, graph: int, found: Curve) -> None:
        """Take another curve for a graph and its equals."""
        peaks = peaks_on(found, self.lowerings[graph])
        for place in (place for place, first in enumerate(self._first) if first == graph):
            self.curves[place] = found
            self.figures[place] = graph_peaks(self.programs[place], self.lowerings[place], peaks)

    def deepest(self) -> list[int]:
        """The plans with the least peak of the step: graph by graph the one that lowers it, until none does."""
        if len(self.curves) == 1:  # what is held before backward lies beside what it saves, and nothing else
            plans = [[point] for point in reversed(range(len(self.curves[0].points)))]
            return min(plans, key=self._solver_peak) if held_beside()[0] else plans[0]
        if self._deepest is None:
            starts = [
                [min(range(len(each)), key=[taken(figures) for figures in each].__getitem__) for each in self.figures]
                for taken in (_peak_first, _saved_first)
            ]
            self._deepest = min(map(self._lowered, starts), key=self._solver_peak)
        return list(self._deepest)

    def _lowered(self, picked: list[int]) -> list[int]:
        peak = self._solver_peak(picked)
        for _ in range(_SWEEPS):
            before = peak
            for graph in dict.fromkeys(self._first):
                trials = [self._with(picked, graph, i) for i in range(len(self.curves[graph].points))]
                best = min(trials, key=self._solver_peak)
                if self._solver_peak(best) < peak:
                    picked, peak = best, self._solver_peak(best)
            if peak == before:
                break
        return picked

    def _with(self, picked: Sequence[int], graph: int, point: int) -> list[int]:
        """The same plans, but for this graph and its equals."""
        return [point if first == graph else i for first, i in zip(self._first, picked, strict=True)]

    def free(self) -> list[int]:
        """The plans with the least peak among those that add at most 1 % of time."""
        result = []
        for lowering, found in zip(self.lowerings, self.curves, strict=True):
            allowed = lowering.problem.base_seconds * 1.01
            may = [(point.peak_bytes, -i) for i, point in enumerate(found.points) if i == 0 or point.seconds <= allowed]
            result.append(-min(may)[1])
        return result

    def seconds(self, picked: Sequence[int]) -> float:
        """The step's time with these plans."""
        return sum(found.points[i].seconds for found, i in zip(self.curves, picked, strict=True))

    def pick(self, limit: int, start: Sequence[int] = ()) -> list[int] | None:
        """From `start` (the fastest), step down the curve that lowers the excess most per second, until it fits."""
        picked = list(start) or [0] * len(self.curves)
        while (peak := self._solver_peak(picked)) > limit:
            moves, before = [], self.seconds(picked)
            for graph in dict.fromkeys(self._first):
                found = self.curves[graph]
                for further in range(picked[graph] + 1, len(found.points)):
                    trial = self._with(picked, graph, further)
                    gain = peak - max(limit, self._solver_peak(trial))
                    if gain > 0:
                        added = self.seconds(trial) - before
                        moves.append((gain / (added + 1e-12), trial))
                        if peak - gain <= limit:
                            break
            if not moves:  # what no single plan lowers, those of least memory may
                best = self.deepest()
                return best if self._solver_peak(best) <= limit else None
            picked = max(moves, key=lambda move: move[0])[1]
        return picked

    def _solver_peak(self, picked: Sequence[int]) -> int:
        key = (*held_beside(), *picked)
        if key not in self._counted:
            self._counted[key] = step_peak([figures[i] for figures, i in zip(self.figures, picked, strict=True)])
        return self._counted[key]

    def build(self, picked: Sequence[int]) -> list[Choice]:
        """The finished programs of these plans."""
        for graph, point in zip(self._first, picked, strict=True):
            if (graph, point) not in self.built:
                plan = self.curves[graph].points[point]
                planned = apply_schedule(self.programs[graph], self.lowerings[graph], plan.schedule)
                program, timeline = self.finish(planned)
                self.built[graph, point] = Choice(self.lowerings[graph], plan, self.curves[graph], program, timeline)
        return [self.built[graph, point] for graph, point in zip(self._first, picked, strict=True)]

    def peak(self, picked: Sequence[int]) -> int:
        """The step's peak with these plans' finished programs."""
        if not self.exact:
            return self._solver_peak(picked)
        key = tuple(picked)
        if key not in self.peaks:
            self.peaks[key] = step_peak([peaks_of(choice.program, choice.timeline) for choice in self.build(picked)])
        return self.peaks[key]

    def _result(self, picked: Sequence[int], minimum: int, feasible: bool) -> StepPlan:
        base = sum(lowering.problem.base_seconds for lowering in self.lowerings)
        seconds = self.seconds(picked)
        curve = self.trade_off(picked)
        return StepPlan((), self.peak(picked), minimum, feasible, seconds, seconds - base, curve)

    def trade_off(self, chosen: Sequence[int]) -> tuple[CurvePoint, ...]:
        """The whole step's curve: of several graphs, the plans that fit limits between the fastest and the deepest."""
        every = list(dict.fromkeys([*self.peaks, tuple(chosen), *self._combinations()]))
        plans = [(self._solver_peak(picked), self.seconds(picked)) for picked in every]
        known = self.peaks if self.exact else {picked: self._solver_peak(picked) for picked in every}
        finished = {index: known[picked] for index, picked in enumerate(every) if picked in known}
        return step_curve(plans, finished, every.index(tuple(chosen)))

    def _combinations(self) -> Iterator[tuple[int, ...]]:
        if len(self.curves) == 1:
            yield from ((index,) for index in range(len(self.curves[0].points)))
            return
        picked: list[int] | None = [0] * len(self.curves)
        high, low = self._solver_peak([0] * len(self.curves)), self._solver_peak(self.deepest())
        for number in range(_COMBINED + 1):
            picked = self.pick(high - (high - low) * number // _COMBINED, picked or ())
            if picked is None:
                return
            yield tuple(picked)


def _peak_first(figures: GraphPeaks) -> tuple[int, int]:
    return max(figures.forward, figures.backward), figures.saved


def _saved_first(figures: GraphPeaks) -> tuple[int, int]:
    return figures.saved, figures.backward
