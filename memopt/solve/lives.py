"""Bytes at each step of many schedules of one problem: what `simulate` counts, of all steps at once."""

from __future__ import annotations

import numpy as np

from memopt.solve.gaps import Rows
from memopt.solve.liveness import Ints, profile
from memopt.solve.problem import StepProblem
from memopt.solve.schedule import Schedule, simulate

_ARRIVES, _READ, _WRITE = range(3)  # what comes first within a step


class Lives:
    """Counts schedules of one problem."""

    def __init__(self, problem: StepProblem) -> None:
        """Take the step in plain numbers."""
        self._problem = problem
        self._reads, self._writes = Rows(problem.reads), Rows(problem.writes)
        self._sizes: Ints = np.array(problem.sizes, dtype=np.int64)
        self._workspace: Ints = np.array(problem.workspace, dtype=np.int64)
        self._arriving: Ints = np.array(sorted(problem.arriving), dtype=np.int64)
        self._pinned, self._resident = np.zeros((2, len(problem.sizes)), dtype=np.bool_)
        self._pinned[list(problem.pinned)] = True
        self._resident[list(problem.resident)] = True

    def of(self, schedule: Schedule) -> tuple[Ints, Ints]:
        """Return the bytes at each step, and the storages that cross from forward to backward, ascending.

        Raises:
            ScheduleError: a step reads a storage that no earlier step made.
        """
        order: Ints = np.array(schedule.steps, dtype=np.int64)
        count = len(order)
        if not count:
            return order, order
        read, read_at = self._reads.of(order)
        written, written_at = self._writes.of(order)
        arriving = self._arriving if schedule.forward < count else self._arriving[:0]
        storage = np.concatenate([arriving, read, written])
        at = np.concatenate([np.full(len(arriving), schedule.forward, dtype=np.int64), read_at, written_at])
        kind = np.repeat([_ARRIVES, _READ, _WRITE], [len(arriving), len(read), len(written)])
        rank = np.argsort((storage * count + at) * 3 + kind, kind="stable")
        storage, at, kind = storage[rank], at[rank], kind[rank]
        makes = kind != _READ
        first = np.append(True, storage[1:] != storage[:-1])  # of all that is done with a storage
        # A read belongs to the copy that was made last, unless another storage's: then to none.
        copy = np.cumsum(makes) - 1
        own = np.zeros(len(storage), dtype=np.bool_)
        made = np.flatnonzero(makes)
        has = copy >= 0
        own[has] = storage[made[copy[has]]] == storage[has]
        if not (own | self._resident[storage]).all():
            simulate(self._problem, schedule)  # it says which
        born, of = at[made], storage[made]
        last = born.copy()
        np.maximum.at(last, copy[own], at[own])
        saved = np.unique(of[(born < schedule.forward) & (last >= schedule.forward)])
        # The first copy of a pinned storage stays, unless it was there before: that is no copy.
        stays = np.flatnonzero(first[made] & self._pinned[of] | (kind[made] == _ARRIVES))
        last[stays] = count - 1
        live = profile(count, np.array((born, last + 1, self._sizes[of])).T) + self._workspace[order]
        return live, saved
