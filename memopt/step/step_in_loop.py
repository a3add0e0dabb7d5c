"""A step within its caller's loop: the loss, eager regions, and what else is there while its graphs run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from memopt.budget import Budget
from memopt.memory.hidden import WholeLedger
from memopt.memory.resident import Resident
from memopt.memory.tangents import Tangents, tangents_of_graph
from memopt.memory.timeline import kept_bytes, timeline
from memopt.program import Program
from memopt.step.eager_peaks import EagerPeaks
from memopt.step.earlier_calls import (
    EAGER,
    Figures,
)
from memopt.step.graph_peaks import between_graphs, step_peak
from memopt.step.loop_bytes import Seen
from memopt.step.loss_allowance import LossAllowance
from memopt.step.session_report import SessionReport


class StepInLoop(SessionReport):
    """A session of which one knows what runs around the graphs.

    Attributes:
        reserve: of so many bytes, those to leave to calls of other models before this one's backward.
        eager: what eager itself takes in the graphs.
        ledger: counts what runs outside of captured graphs, while a call is rehearsed.
        outside_bytes: what runs outside of captured graphs takes, by the latest rehearsal.
        outside_beside: what of it is there while a graph runs, and gradients of outputs that later graphs run beside.
        allowance: what is allowed for of a loss and of calls of others, before they were seen.
        outside_places: what that is, in words.
        seen: what the caller's loop was seen to hold around the graphs.
        planned_with: what of that was known as the latest graph was planned.
    """

    def __init__(self, budget: Budget | None, resident: Resident) -> None:
        """Nothing was seen of the loop yet."""
        super().__init__(budget, resident)
        self.reserve: Callable[[int], int] = lambda _: 0
        self.eager = EagerPeaks()
        self.ledger: WholeLedger | None = None
        self.outside_bytes = self.outside_beside = 0
        self.outside_places = ""
        self.allowance = LossAllowance()
        self.seen, self.planned_with = Seen(), Seen()

    def sees(self, seen: Seen) -> None:
        """The caller's loop was seen to hold this around the graphs by now."""
        self.seen = seen

    def counts_in(self, ledger: WholeLedger | None) -> None:
        """A call is rehearsed under this ledger, or under none."""
        self.ledger = ledger

    def count_outside(self, peak: int, beside: int, places: str, tangents: Tangents) -> None:
        """Count what runs outside of captured graphs, the caller's loss too where the model returns none.

        Args:
            peak: the most bytes that it holds.
            beside: the most that it holds while a graph runs.
            places: what it is, in words.
            tangents: the gradients of what the call returns.
        """
        resident, beside = self.resident, beside + tangents.early
        self.resident = dataclasses.replace(resident, outside=resident.outside - self.outside_beside + beside)
        self.outside_bytes, self.outside_beside, self.outside_places = peak, beside, places
        self.allowance.counts(tangents, whole=self._is_whole)

    def expects_loss(self, programs: Sequence[Program]) -> None:
        """Allow for the caller's loss where a graph is all that there is of a call, and returns none."""
        self.planned_with = self.seen
        if len(programs) == 1 and not self.broken:
            wanted = self.allowance.allows and self.budget is not None and not self.soft
            tangents = tangents_of_graph(programs[0]) if wanted else Tangents()
            self.allowance.counts(tangents, whole=self._is_whole)
            limit = self.limit(0) if wanted else None
            room = 0 if limit is None else max(0, self.usable(limit) - self.resident.total)
            self.allowance.reserves(self.reserve(room))

    @property
    def _is_whole(self) -> bool:
        """Whether the budget is all of eager's own peak."""
        return self.budget is not None and self.budget.fraction == 1

    def allows_no_more(self) -> bool:
        """Allow for less of what was not seen yet; whether more was allowed for."""
        return self.allowance.lessens(seen=self.seen.known, several=self.broken)

    def around_graphs(
        self, seen: Seen | None = None, *, usual: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Within: peaks are of the step's graphs with what runs between them, and what the loop holds there.

        Args:
            seen: that; what it was seen to hold by now where it is not given.
            usual: whether it is the usual loss that there is, if none was seen yet, and not all that is allowed for.
        """
        seen = self.seen if seen is None else seen
        early = self.allowance.tangents.early  # they are counted as held all the time
        loss = max(self._loss_beside(seen), self.allowance.reserved)
        if usual and not seen.known:
            loss = self.allowance.usual
        return between_graphs(max(0, self.outside_bytes - self.outside_beside + early, loss - early), seen.forward)

    @property
    def loss_beside(self) -> int:
        """Bytes that the caller's loss holds, as it was seen or is allowed for."""
        return self._loss_beside(self.seen)

    @property
    def beside_graphs(self) -> int:
        """The most bytes that are made where no graph runs: by the loss, the optimizer's step, or as the next batch."""
        resident = self.resident
        return max(self.loss_beside, resident.beside_gradients, resident.inputs)

    def _loss_beside(self, seen: Seen) -> int:
        return seen.between if seen.known else self.allowance.tangents.loss

    def _apart(self, seen: Seen) -> int:
        """The most bytes while none of the model's graphs runs: before the call, behind them in backward, after it."""
        resident = self.resident.total - self.resident.outside
        return max(seen.before, seen.after, resident + seen.behind if seen.behind else 0)

    def _eager_keeps(self) -> int:
        """Bytes by which eager's backward takes more where its graph is kept for another backward."""
        planned = self.step.planned if self.step else ()
        return sum(kept_bytes(item.before, timeline(item.before)) for item in planned)

    def needed_around(self, graphs: Sequence[Figures], seen: Seen) -> int:
        """Bytes that a step of these graphs takes in a loop that holds so much."""
        all_eager = all(graph.key == EAGER for graph in graphs)  # then nothing runs outside of others
        base = max(graph.base for graph in graphs) + (0 if all_eager else self.outside_beside) + seen.beside
        with between_graphs(seen.between, seen.forward) if all_eager else self.around_graphs(seen):
            return base + step_peak([graph.peaks for graph in graphs])

    @property
    def counts_all(self) -> bool:
        """Whether the budget is of all that the process holds: one in bytes."""
        return self.budget is not None and self.budget.bytes is not None

    @property
    def usable_limit(self) -> int | None:
        """What tensors may take of the budget; None without one, or where a fraction is not fixed yet."""
        limit = None if self.soft else self.limit(0)
        return None if limit is None else self.usable(limit)

    @property
    def planned_beside(self) -> int:
        """Bytes that what was planned last leaves to earlier calls of the step, and to parts that are not captured."""
        return super().planned_beside - self.seen.beside

    def optimizer_peak(self) -> int:
        """The most bytes while no graph runs: in `optimizer.step()`, before the next call, behind them in backward.

        0 of a call of inference: an optimizer's step is none of an evaluation, which was said to be over its budget.
        """
        if self.role.to_be_trained or self.role.trained_beside:
            return 0
        peak = super().optimizer_peak()
        return max(peak + self.seen.held if peak else 0, self._apart(self.seen) if self.role.trains else 0)

    def code_peak(self) -> int:
        """As of the step's graphs alone, with what runs between them."""
        with self.around_graphs():
            return super().code_peak()

    @property
    def asks_for_eager(self) -> bool:
        """Whether what eager itself holds in a graph is worth knowing: a fraction is of it, and not fixed yet."""
        fraction = self.budget is not None and self.budget.bytes is None
        return fraction and not self.reference.is_fixed

    def kept_more(self, saved: int) -> int:
        """Bytes by which backward takes more where its graph is kept for another backward: what is saved does not go.

        Args:
            saved: bytes that the step's calls have saved: as much where their programs are not known.
        """
        if self.step is None or not self.step.planned:
            return saved
        return min(saved, sum(kept_bytes(item.program, item.timeline) for item in self.step.planned))
