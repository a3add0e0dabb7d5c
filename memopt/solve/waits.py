"""What a wait is worth: the seconds that ending it adds, and the seconds that beginning it spares."""

from __future__ import annotations

import bisect

import numpy as np

from memopt.solve.archive import State
from memopt.solve.gaps import Gaps
from memopt.solve.rollout import FOREVER, Rollout

_DEPTH = 100  # operations after which a chain of recomputations is dear enough to stop adding


def _repeated(rollout: Rollout, state: State) -> list[bool]:
    """Return per operation whether the state runs it more than once."""
    runs = np.bincount(np.array(state.outcome.steps, dtype=np.int64), minlength=len(rollout.problem.reads))
    repeated: list[bool] = (runs > 1).tolist()
    return repeated


class AddedSeconds:
    """Seconds that recomputing a storage at a step would add to a state, by the rules of the rollout."""

    def __init__(self, rollout: Rollout, state: State, gaps: Gaps, early: float) -> None:
        """Take the share `early` of its cost that counts where an operation is recomputed anyway, but later."""
        self._rollout, self._problem, self._state, self._early = rollout, rollout.problem, state, early
        self._first: list[int] = gaps.first_touch.tolist()
        self._keys: list[int] = gaps.keys.tolist()
        self._count = len(state.outcome.steps) + 1
        self._bases: list[int] = state.outcome.bases.tolist()
        self._again = _repeated(rollout, state)

    def of(self, storage: int, step: int, crossing: bool) -> float:
        """Return the seconds; `crossing` when it is the forward copy's wait that ends."""
        problem, producer = self._problem, self._problem.producer
        if crossing and self._again[producer[storage]]:
            return 0.0
        total, seen, stack = 0.0, set[int](), [producer[storage]]
        while stack and len(seen) < _DEPTH:
            operation = stack.pop()
            if operation in seen:
                continue
            seen.add(operation)
            sooner = operation != producer[storage] and self._again[operation]
            total += problem.costs[operation] * (self._early if sooner else 1.0)
            stack.extend(producer[read] for read in problem.reads[operation] if not self._there(read, step))
        return total

    def missing(self, storage: int, step: int) -> tuple[int, ...]:
        """Return what the storage's operation reads that would have to be recomputed for it alone."""
        producer = self._problem.producer
        reads = self._problem.reads[producer[storage]]
        return tuple(read for read in reads if not self._there(read, step) and not self._again[producer[read]])

    def _there(self, storage: int, step: int) -> bool:
        if self._rollout.fixed[storage]:
            return True
        if self._first[storage] >= step:
            if self._state.saved[storage]:
                return True
            return self._early == 0.0 and self._again[self._problem.producer[storage]]
        hold = self._state.hold[storage]
        if hold == FOREVER:
            return True
        before = self._keys[bisect.bisect_left(self._keys, storage * self._count + step) - 1] % self._count
        return bisect.bisect_left(self._bases, before) + hold >= bisect.bisect_left(self._bases, step)


class SparedSeconds:
    """Seconds that not recomputing a storage once would spare, with what was recomputed for it alone."""

    def __init__(self, rollout: Rollout, state: State, gaps: Gaps) -> None:
        self._fixed, self._problem = rollout.fixed, rollout.problem
        self._reads: list[int] = gaps.reads_back.tolist()
        self._again = _repeated(rollout, state)

    def of(self, storage: int) -> float:
        """Return the seconds."""
        problem, producer = self._problem, self._problem.producer
        total, left, stack = 0.0, dict[int, int](), [producer[storage]]
        for _ in range(_DEPTH):
            operation = stack.pop()
            total += problem.costs[operation]
            for read in problem.reads[operation]:
                if not self._fixed[read] and self._again[producer[read]]:
                    left[read] = left.get(read, self._reads[read]) - 1
                    if left[read] == 0:
                        stack.append(producer[read])
            if not stack:
                break
        return total
