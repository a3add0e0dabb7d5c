"""A step of several calls of one model."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from memopt.budget import Budget, BudgetError, format_bytes
from memopt.memory.allocator import with_slack
from memopt.memory.optimizer_steps import steps_seen
from memopt.memory.resident import Resident
from memopt.program import Program
from memopt.report.record import Report
from memopt.step.eager_in_loop import eager_in_loop
from memopt.step.earlier_calls import (
    EAGER,
    DoesNotFitBesideError,
    EarlierCalls,
    Figures,
    Ran,
    calls_in_words,
)
from memopt.step.expected_calls import ExpectedCalls
from memopt.step.graph_peaks import GraphPeaks, peaks_of, step_peak
from memopt.step.loop_bytes import Loop, worth
from memopt.step.other_tensors import others_in_words
from memopt.step.planned import Planned, fingerprint
from memopt.step.recomputed_calls import FirstCalls, RecomputedCall
from memopt.step.step_in_loop import StepInLoop


class SharedStep(StepInLoop):
    """A session of which one call may be a part of the step.

    Attributes:
        model_name: of the model's class.
        calls: of the model in one step, that are planned together.
        known_calls: what is known of those; None where nothing is to be.
        earlier: the calls of the present step before this one, whose backward has not run.
        beside_calls: the same of other models that share the budget.
        elsewhere: bytes that calls of models hold which memopt compiled under budgets of their own.
        waiting: how many further calls of them, and of this one, are to be expected of a step that was not seen yet.
        part: whether the model is likely to be a part of what its steps train.
        inputs_beside: bytes of their arguments beside those of this one.
        ran: the graphs that the present call has run.
        results: what these have returned, what the model keeps for itself too.
        first_calls: these, where they can let go of what they saved and recompute it.
        last_word: whether a call that has no room beside earlier ones is refused.
        has_other_ways: whether one that does not fit is not refused yet, as earlier calls of the step may let go of
            what they saved: then no step is taken over the budget to name a minimum.
    """

    def __init__(self, budget: Budget | None, resident: Resident) -> None:
        """One call is one step, as far as is known."""
        super().__init__(budget, resident)
        self.model_name = ""
        self.calls = 1
        self._expected = ExpectedCalls()
        self.known_calls: EarlierCalls | None = None
        self.earlier: list[Ran] = []
        self.beside_calls: list[Ran] = []
        self.elsewhere: Callable[[], int] = int
        self.waiting: Callable[[], int] = int
        self.part: Callable[[], bool] = bool
        self.inputs_beside = 0
        self.ran: list[Figures] = []
        self.results: list[weakref.ref[torch.Tensor]] = []
        self.first_calls = FirstCalls()
        self._coming = self._steps_seen = 0
        self.last_word = self.has_other_ways = False

    def begins_beside(self, earlier: list[Ran], others: list[Ran], inputs: int, *, can_drop: bool) -> None:
        """A call begins beside these of its step, whose backward has not run.

        Args:
            earlier: those of this model.
            others: those of other models that share the budget.
            inputs: bytes of their arguments beside those of this one.
            can_drop: whether some hold what they can recompute.
        """
        self.earlier, self.beside_calls, self.inputs_beside = earlier, others, inputs
        self.ran, self.results = [], []
        self.first_calls.begin()
        if earlier or others:
            self.has_other_ways = not self.last_word and can_drop

    def joins(
        self,
        *,
        calls: int,
        known: EarlierCalls,
        elsewhere: Callable[[], int],
        waiting: Callable[[], int],
        part: Callable[[], bool],
        older: Callable[[], int],
        uncounted: Callable[[], int],
        reserve: Callable[[int], int],
    ) -> None:
        """Be one of a model's sessions: so many calls are planned together; the others are attributes of this class."""
        self.calls, self.known_calls = calls, known
        self.elsewhere, self.waiting, self.part, self.reserve = elsewhere, waiting, part, reserve
        self.older, self.uncounted = older, uncounted

    def has_last_word(self, last: bool) -> None:
        """Whether a call that has no room beside earlier ones is refused from now on."""
        self.last_word = last

    def runs_eagerly(self, report: Report, graph: Figures | None) -> None:
        """Nothing is planned of a call: this is its report, and what it takes where it is one of a training step."""
        self.unplanned |= self.report is None
        self.report = report
        if graph is not None:
            self.ran = [graph]

    def is_planned(self) -> None:
        """What ran was planned."""
        self.unplanned = False

    def ends_beside(self) -> None:
        """The call is over; what it has run is known until the next one begins."""
        self.earlier, self.beside_calls, self.has_other_ways = [], [], False

    def excess_around(self, calls: Sequence[Ran]) -> tuple[int, int]:
        """Bytes by which a step of these calls is over its limit with what the loop holds around them; the limit.

        Both are 0 where there is none, or nothing is known of the calls. What was planned over what the limit leaves to
        tensors was judged by a step of its own: over it is what the loop holds beyond what was known then.
        """
        graphs = [graph for ran in calls for graph in ran.graphs]
        if not graphs or self.soft:
            return 0, 0
        needed = self.needed_around(graphs, self.seen)
        limit = self.limit(0)
        if limit is None:
            return 0, 0
        planned = self.needed_around(graphs, self.planned_with)
        lowered = needed + self.inputs_beside - max(planned - self.fell(limit), self.usable(limit))
        apart = self._apart(self.seen) - max(self._apart(self.planned_with), self.usable(limit))
        captured = self.capture_reserve.lacks(self.beside_graphs)
        excess = needed + self.inputs_beside - max(planned, self.usable(limit))
        return max(0, excess, worth(lowered, self.resident.device), apart, captured), limit

    def fell(self, limit: int) -> int:
        """Bytes by which this limit is below what was planned with: a fraction was of more than eager takes."""
        return 0 if self.step is None or self.step.limit is None else self.step.fallen + self.step.limit - limit

    def sees_loop(self, calls: Sequence[Ran], loop: Loop, beside: Sequence[Ran] = ()) -> bool:
        """A step of these calls was seen in its loop: a fraction is of what eager takes in the same one.

        Args:
            calls: of the model.
            loop: what it held around them.
            beside: calls of other models of the budget that waited for their backward as the last of these returned.

        Returns:
            Whether to plan anew: fewer calls were made than an earlier run of the script has met.
        """
        graphs = [graph for ran in calls for graph in ran.graphs]
        if not graphs or self.soft or self.budget is None:
            return False
        self.reference.whole = True
        device, known = self.resident.device, self.known_calls
        made = len(calls) if known is None else max(len(calls), known.most)
        fewer = bool(self._expected) and made < self.calls
        if fewer:
            self._expected.were_fewer(self.model_name, self.budget, graphs[0].key, made)
            self.reference.has_fewer_calls(self._eager_in(graphs, loop, beside), made)
        keys = tuple(graph.key for graph in graphs)
        seen = loop.kept or any(worth(size, device) for size in (loop.forward, loop.between, loop.backward))
        if not fewer and (seen or self.reference.decided_by(keys)):
            self.reference.loops(self._eager_in(graphs, loop, beside), len(calls) + len(beside), keys)
        return fewer

    def _eager_in(self, graphs: Sequence[Figures], loop: Loop, beside: Sequence[Ran]) -> int:
        """Bytes that a step of these graphs takes in such a loop, beside such calls, as eager runs it."""
        apart = self.broken and any(graph.key != EAGER for graph in graphs)
        found = eager_in_loop(
            [*(graph.eager for ran in beside for graph in ran.graphs), *(graph.eager for graph in graphs)],
            loop,
            between=self.outside_bytes + self.allowance.tangents.early if apart else 0,
            beside=self.outside_beside if apart else 0,
            most=self.eager.step if apart else None,
            kept=self._eager_keeps() if loop.kept else 0,
        )
        return max(max(graph.base for graph in graphs) + self.inputs_beside + found, super().optimizer_peak())

    def over(self, needed: int, limit: int) -> BudgetError:
        """The error of what was planned last: it needs so many bytes, all that is resident included."""
        assert self.report is not None
        needed = with_slack(needed, self.resident.device)
        return BudgetError(needed, limit, self.report.breakdown, beside=self.beside)

    def _with_other_calls(self, programs: Sequence[Program]) -> tuple[list[Program], int]:
        """The graphs of all calls of the step, and at which place those of this call begin."""
        if self.calls == 1 or self.known_calls is None:
            return list(programs), 0
        return self.known_calls.with_programs(programs, len(self.earlier), self.calls)

    def _of_the_step(
        self, keys: tuple[str, ...], captured: Sequence[Planned], base: int, default: int
    ) -> tuple[int, Hashable, int]:
        """What the step takes in bytes as eager runs it, all of its calls so far; what tells it apart; its calls.

        `default` is what these graphs take above what is resident, where eager's own is not known.
        """
        every = [*self.beside_calls, *self.earlier]
        if not every or self.calls > 1:
            own = self.eager.of_step(keys, default, self.outside_beside)
            return base + own, (id(self), keys), self.calls + len(self.beside_calls)
        before = [graph.eager for ran in every for graph in ran.graphs]
        whole = base - self.resident.outside + self.inputs_beside + self.eager.of_calls(before, keys, captured)
        return whole, (id(self), keys), len(every) + 1

    def calls_of_script(self, key: str) -> tuple[int, int]:
        """Calls of a step, and bytes of their arguments, as an earlier run of the script has met them: 1 if none did.

        Args:
            key: fingerprint of the first graph of a call.
        """
        beside = self.calls > 1 or self.earlier
        if self.step is not None or beside or self.known_calls is None or self.soft:
            return 1, 0
        return self._expected.of_script(self.model_name, self.budget, key)

    def expect_known_calls(self, programs: Sequence[Program]) -> None:
        """Plan the first step together with the calls that an earlier run of the script has met in it."""
        calls, arguments = self.calls_of_script(fingerprint(programs[0])) if programs else (1, 0)
        if calls == 1:
            return
        beside = max(0, arguments - self.resident.inputs)
        self._expected.begin(beside, self.reference)
        self.calls = calls
        self.resident = dataclasses.replace(self.resident, outside=self.resident.outside + beside)

    @property
    def counts_on_expected(self) -> bool:
        """Whether calls are planned together only as an earlier run had them."""
        return bool(self._expected) and self.calls != 1 and not self.earlier

    def one_call(self) -> bool:
        """Whether that was so; a call is planned by itself from now."""
        if not self.counts_on_expected:
            return False
        beside, self.calls = self._expected.take_back(self.reference), 1
        self.resident = dataclasses.replace(self.resident, outside=max(0, self.resident.outside - beside))
        return True

    def figures(self, program: Program | None) -> Figures | None:
        """What a graph that was just lowered takes; None where it is not one of a training step."""
        step = self.step
        if step is None:
            return None
        base = step.base - self.resident.outside
        if step.known is not None:
            return Figures(*step.known, base, step.keys[0], None)
        if program is None:
            return None
        key = fingerprint(program)
        if key not in step.keys:
            return None
        return Figures(*self.peaks_at(step.keys.index(key)), base, key, program)

    def peaks_at(self, place: int) -> tuple[GraphPeaks, GraphPeaks]:
        """What a graph of the step takes as it runs, and as eager runs it, by its place in the step."""
        assert self.step is not None
        key, item = self.step.keys[place], self.step.planned[place]
        eager = self.eager.of(key, item.before, item.timeline_before)
        return self._emitted.get(key) or peaks_of(item.program, item.timeline), eager

    def runs(self, graph: Figures) -> None:
        """A graph of a training step is about to run.

        Raises:
            DoesNotFitBesideError: earlier calls of the step hold so much that it is to be planned with that.
            BudgetError: it was, and the budget is not kept all the same.
        """
        every = [*self.beside_calls, *self.earlier]
        limit = self.limit(0) if every and not self.soft else None
        if limit is not None:
            needed = self._needed_beside(every, graph)
            if needed > self.usable(limit):
                if not self.last_word and not self.ran:
                    raise DoesNotFitBesideError(graph)
                raise self.over(needed, limit)
        self.ran.append(graph)

    def _needed_beside(self, every: Sequence[Ran], graph: Figures) -> int:
        peaks = [known.peaks for ran in every for known in ran.graphs]
        peaks += [known.peaks for known in (*self.ran, graph)]
        needed = graph.base + self.inputs_beside + step_peak(peaks)
        # A call is recomputed in the first steps, before there is all state of the optimizer, which steps after that.
        self._coming = self.resident.coming if any(ran.dropped for ran in every) and not self.beside_calls else 0
        self._steps_seen = steps_seen()
        return needed - self._coming

    def returns(self, results: Any) -> None:
        """A graph of a training step has returned these."""
        self.results += [weakref.ref(each) for each in results if isinstance(each, torch.Tensor)]

    def with_results(self, outputs: Any) -> Any:
        """What the call has returned, with what its graphs have returned beside that and is kept by someone."""
        kept = [result for each in self.results if (result := each()) is not None]
        return (outputs, kept) if kept else outputs

    def fits_beside(self, every: Sequence[Ran], graph: Figures) -> bool:
        """Whether a graph keeps the budget beside these calls, as it was planned for a step of fewer."""
        limit = self.limit(0)
        return limit is None or self._needed_beside(every, graph) <= self.usable(limit)

    def fits_around(self, every: Sequence[Ran]) -> bool:
        """Whether a step of these calls keeps the budget with what is known of its loop; False without either."""
        limit, graphs = self.limit(0), [graph for ran in every for graph in ran.graphs]
        if limit is None or self.soft or not graphs:
            return False
        return self.needed_around(graphs, self.seen) + self.inputs_beside <= self.usable(limit)

    def before_recomputing(self, every: Sequence[Ran], call: Ran) -> None:
        """A call is about to be recomputed, in its backward, while these of the step are still to have theirs.

        Raises:
            BudgetError: there is no room for that.
        """
        limit, (graph,) = self.limit(0), call.graphs
        held = sum(ran.saved for ran in every)
        stepped = self._coming and steps_seen() != self._steps_seen
        if limit is None or not (held or stepped):  # as it was planned for: the last one of a step
            return
        gradients = sum(size for _, size in graph.peaks.gradients)
        needed = graph.base + self.inputs_beside + held + gradients + max(graph.peaks.forward, graph.peaks.backward)
        needed -= 0 if stepped else self._coming
        if needed > self.usable(limit):
            raise self.over(needed, limit)

    def recomputable(self) -> list[weakref.ref[RecomputedCall]] | None:
        """Where a call is to be listed that is about to run and can be recomputed; None where it need not be."""
        return None if self.soft else self.first_calls.to_be_listed()

    @property
    def beside(self) -> str:
        """What takes room beside the plan, in words."""
        elsewhere, others = self.elsewhere(), others_in_words(self.resident.others)
        if others and elsewhere:
            size = format_bytes(elsewhere, short=True)
            others += f", {size} of them calls of another compiled model, whose backward has not run: "
            others += "memopt.compile([one, other], budget=...) plans both together"
        return "; ".join(filter(None, (others, self.beside_in_step)))

    @property
    def beside_in_step(self) -> str:
        """The part of it that a next step may be planned with otherwise: all but other tensors of the process."""
        if around := str(self.seen):
            return f"the loop around the model holds {around}"
        if self.outside_bytes:
            size = format_bytes(self.outside_bytes, short=True)
            return f"what runs outside of captured graphs takes {size}: {self.outside_places}"
        return calls_in_words(self.calls, self.earlier, self.beside_calls, self.inputs_beside)
