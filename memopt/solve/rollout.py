"""Rollout: from decisions about storages to a schedule, and its exact bytes and seconds, fast enough for a search."""

from __future__ import annotations

import dataclasses

import numpy as np

from memopt.solve.liveness import Ints, profile
from memopt.solve.problem import StepProblem

FOREVER = 1 << 40  # a hold that no step outlasts


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A decision played out.

    Attributes:
        steps: the schedule's operations, in order.
        peak_bytes, peak_step: the most bytes, and the first step that reaches them; 0 and -1 without steps.
        seconds: sum of all costs.
        live: bytes per step.
        bases: per backward operation, the step of its regular run (recomputations for it come just before).
    """

    steps: list[int]
    peak_bytes: int
    peak_step: int
    seconds: float
    live: Ints
    bases: Ints


class Rollout:
    """Plays decisions out: walks backward in order and recomputes what is missing just before it is read.

    A decision has two parts. `saved` says per storage whether its forward copy waits for its first read in backward.
    `hold` says per storage for how many backward operations a copy waits after each touch before it counts as dropped.
    Both are True and FOREVER for storages in `fixed`, which are never recomputed for their own sake.
    """

    def __init__(self, problem: StepProblem) -> None:
        self.problem = problem
        forward, operations = problem.forward, len(problem.reads)
        self.sizes: Ints = np.array(
            [
                size if maker >= 0 or (storage in problem.arriving and forward < operations) else 0
                for storage, (size, maker) in enumerate(zip(problem.sizes, problem.producer, strict=True))
            ],
            dtype=np.int64,
        )
        self.workspace: Ints = np.array(problem.workspace, dtype=np.int64)
        self.costs = np.array(problem.costs, dtype=np.float64)
        # What is always there when it is read: never dropped, so never recomputed.
        self.fixed = [
            maker < 0 or not problem.recomputable[maker] or storage in problem.pinned
            for storage, maker in enumerate(problem.producer)
        ]
        self.kept: Ints = np.array(sorted((problem.pinned | problem.arriving) - problem.resident), dtype=np.int64)
        self._born = [0] * len(problem.sizes)
        self._last = [0] * len(problem.sizes)
        for operation in range(forward):
            for storage in problem.writes[operation]:
                self._born[storage] = self._last[storage] = operation
            for storage in problem.reads[operation]:
                self._last[storage] = operation
        for storage in problem.arriving:
            self._born[storage] = self._last[storage] = min(forward, max(operations - 1, 0))
        self._start = [FOREVER if always else -1 for always in self.fixed]
        self._made = [s for s, maker in enumerate(problem.producer) if 0 <= maker < forward and not self.fixed[s]]
        # Of what an operation reads: what may be missing, and what takes bytes: only of that the last touch matters.
        self._movable = [tuple(s for s in reads if not self.fixed[s]) for reads in problem.reads]
        counted: list[bool] = (self.sizes != 0).tolist()
        self._counted = [tuple(s for s in reads if counted[s]) for reads in problem.reads]

    def play(self, saved: list[bool], hold: list[int]) -> Outcome:
        """Return the schedule that a decision leads to, with its exact bytes and seconds."""
        problem = self.problem
        movable, counted, writes, producer = self._movable, self._counted, problem.writes, problem.producer
        until = list(self._start)
        for storage in self._made:
            if saved[storage]:
                until[storage] = FOREVER
        current = list(range(len(until)))
        copies, born, last = list(current), list(self._born), list(self._last)
        steps = list(range(problem.forward))
        bases: list[int] = []
        step = problem.forward
        for base in range(problem.forward, len(writes)):
            for needed in movable[base]:
                if until[needed] >= base:
                    continue
                stack = [producer[needed]]
                while stack:
                    operation = stack[-1]
                    for read in movable[operation]:
                        if until[read] < base:
                            stack.append(producer[read])
                            break
                    else:
                        stack.pop()
                        for read in counted[operation]:
                            last[current[read]] = step
                        for read in movable[operation]:
                            until[read] = base + hold[read]
                        for write in writes[operation]:
                            current[write] = len(copies)
                            copies.append(write)
                            born.append(step)
                            last.append(step)
                            until[write] = base + hold[write]
                        steps.append(operation)
                        step += 1
            for read in counted[base]:
                last[current[read]] = step
            for read in movable[base]:
                until[read] = base + hold[read]
            for write in writes[base]:
                born[write] = last[write] = step
                until[write] = base + hold[write]
            steps.append(base)
            bases.append(step)
            step += 1
        return self._measure(steps, bases, copies, born, last)

    def _measure(
        self, steps: list[int], bases: list[int], copies: list[int], born: list[int], last: list[int]
    ) -> Outcome:
        # `copies` names the storage of each copy; copy i is the first copy of storage i while i is a storage.
        order, storages = np.array(steps, dtype=np.int64), np.array(copies, dtype=np.int64)
        begins, ends = np.array(born, dtype=np.int64), np.array(last, dtype=np.int64)
        if not steps:
            return Outcome(steps, 0, -1, 0.0, order, order)
        ends[self.kept] = len(steps) - 1
        live = profile(len(steps), np.array((begins, ends + 1, self.sizes[storages])).T) + self.workspace[order]
        peak = int(live.argmax())
        seconds = float(self.costs[order].sum())
        return Outcome(steps, int(live[peak]), peak, seconds, live, np.array(bases, dtype=np.int64))
