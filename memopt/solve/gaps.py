"""Gaps: where, in a decision played out, a copy waits for its next read, and where a wait would spare work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from memopt.solve.liveness import Ints
from memopt.solve.rollout import Outcome, Rollout


@dataclasses.dataclass(frozen=True)
class Gaps:
    """Stretches between two touches of a storage, as parallel arrays: the steps strictly between `start` and `end`.

    A touch is a write or a read; a gap that starts in forward starts at the last touch there.

    Attributes:
        storage, start, end: one entry per gap.
        waits: whether the copy waits through the gap, to be read at `end`; else `end` writes it anew.
        first_touch: per storage, its first touch in backward; the number of steps where there is none.
        keys: storage · (steps + 1) + step of every touch, ascending.
        reads_back: per storage, the number of reads in backward.
    """

    storage: Ints
    start: Ints
    end: Ints
    waits: Ints
    first_touch: Ints
    keys: Ints
    reads_back: Ints


class GapFinder:
    """Finds the gaps of outcomes of one problem."""

    def __init__(self, rollout: Rollout) -> None:
        problem = rollout.problem
        self._forward = problem.forward
        self._fixed = np.array(rollout.fixed, dtype=np.bool_)
        self._reads = Rows(problem.reads)
        self._writes = Rows(problem.writes)
        last = np.full(len(problem.sizes), -1, dtype=np.int64)
        for operation in range(problem.forward):
            last[list(problem.writes[operation])] = operation
            last[list(problem.reads[operation])] = operation
        self._parked = np.flatnonzero((last >= 0) & ~self._fixed)
        self._parked_step = last[self._parked]

    def find(self, outcome: Outcome) -> Gaps:
        """Return every gap that ends in backward, of storages that may be recomputed."""
        order = np.array(outcome.steps[self._forward :], dtype=np.int64)
        count = len(outcome.steps) + 1
        read, read_step = self._reads.of(order)
        written, written_step = self._writes.of(order)
        storage = np.concatenate([self._parked, written, read])
        step = np.concatenate([self._parked_step, written_step + self._forward, read_step + self._forward])
        is_read = np.zeros(len(storage), dtype=np.int64)
        is_read[len(storage) - len(read) :] = 1
        movable = ~self._fixed[storage]
        key, is_read = (storage * count + step)[movable], is_read[movable]
        rank = np.argsort(key, kind="stable")
        key, is_read = key[rank], is_read[rank]
        storage, step = np.divmod(key, count)
        same = storage[1:] == storage[:-1]
        first = np.full(len(self._fixed), count - 1, dtype=np.int64)
        backward = step >= self._forward
        np.minimum.at(first, storage[backward], step[backward])
        reads_back = np.bincount(storage[is_read == 1], minlength=len(first))
        return Gaps(storage[1:][same], step[:-1][same], step[1:][same], is_read[1:][same], first, key, reads_back)


class Rows:
    """Rows of differing length, to be gathered for many operations at once."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self._flat = np.array([entry for row in rows for entry in row], dtype=np.int64)
        self._count = np.array([len(row) for row in rows], dtype=np.int64)
        self._start = np.cumsum(self._count) - self._count

    def of(self, operations: Ints) -> tuple[Ints, Ints]:
        """Return all entries of the rows of `operations`, and the position in `operations` that each belongs to."""
        count = self._count[operations]
        position = np.repeat(np.arange(len(operations), dtype=np.int64), count)
        inside = np.arange(len(position), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
        return self._flat[self._start[operations][position] + inside], position
