"""Bytes at each step of many schedules of one problem: what is alive, and what results share with what dies there."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from memopt.solve.gaps import Rows
from memopt.solve.liveness import Ints, profile
from memopt.solve.problem import StepProblem
from memopt.solve.schedule import Schedule, simulate

_ARRIVES, _READ, _WRITE = range(3)  # what comes first within a step

Flags = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Life:
    """What a schedule takes.

    Attributes:
        live: bytes at each step.
        spared: bytes at each step that results share with what is read there last.
        saved: storages that cross from forward to backward, ascending.
    """

    live: Ints
    spared: Ints
    saved: Ints


class Lives:
    """Counts schedules of one problem."""

    def __init__(self, problem: StepProblem, may: Sequence[bool] = ()) -> None:
        """Take the step in plain numbers, and per operation whether it may write over what it reads; empty: none."""
        self._problem, self._some = problem, any(may)
        self._reads, self._writes = Rows(problem.reads), Rows(problem.writes)
        self._sizes: Ints = np.array(problem.sizes, dtype=np.int64)
        self._workspace: Ints = np.array(problem.workspace, dtype=np.int64)
        self._arriving: Ints = np.array(sorted(problem.arriving), dtype=np.int64)
        self._pinned, self._resident = self._marks(problem.pinned), self._marks(problem.resident)
        self._held = self._marks(problem.pinned | problem.resident | problem.arriving)
        self._may: Flags = np.array(may or [False] * len(problem.reads), dtype=np.bool_)
        self._made: Ints = np.array([len(made) for made in problem.writes], dtype=np.int64)
        self._first: Ints = np.array([problem.sizes[made[0]] if made else 0 for made in problem.writes], dtype=np.int64)

    def of(self, schedule: Schedule) -> Life:
        """Return what a schedule takes.

        Raises:
            ScheduleError: a step reads a storage that no earlier step made.
        """
        order: Ints = np.array(schedule.steps, dtype=np.int64)
        count = len(order)
        if not count:
            return Life(order, order, order)
        read, read_at = self._reads.of(order)
        written, written_at = self._writes.of(order)
        arriving = self._arriving if schedule.forward < count else self._arriving[:0]
        storage = np.concatenate([arriving, read, written])
        at = np.concatenate([np.full(len(arriving), schedule.forward, dtype=np.int64), read_at, written_at])
        kind = np.repeat([_ARRIVES, _READ, _WRITE], [len(arriving), len(read), len(written)])
        rank = np.argsort((storage * count + at) * 3 + kind, kind="stable")
        storage, at, kind = storage[rank], at[rank], kind[rank]
        begins = np.append(True, storage[1:] != storage[:-1])  # with what is done first with a storage
        # A read belongs to the copy that was made last, unless that is another storage's: then to none.
        made = np.flatnonzero(kind != _READ)
        copy = np.cumsum(kind != _READ) - 1
        own = np.zeros(len(storage), dtype=np.bool_)
        own[copy >= 0] = storage[made[copy[copy >= 0]]] == storage[copy >= 0]
        if not (own | self._resident[storage]).all():
            simulate(self._problem, schedule)  # it says which
        born, of = at[made], storage[made]
        last = born.copy()
        np.maximum.at(last, copy[own], at[own])
        saved = np.unique(of[(born < schedule.forward) & (last >= schedule.forward)])
        last[(begins[made] & self._pinned[of]) | (kind[made] == _ARRIVES)] = count - 1
        live = profile(count, np.array((born, last + 1, self._sizes[of])).T) + self._workspace[order]
        since = np.full(len(storage), -1, dtype=np.int64)
        since[own] = born[copy[own]]
        since[own] = np.where(kind[made[copy[own]]] == _WRITE, since[own], -1)
        spared = np.zeros(count, dtype=np.int64)
        if self._some:
            self._spare(spared, order, schedule.forward, storage, at, kind == _READ, begins, since)
        return Life(live, spared, saved)

    def _spare(
        self,
        spared: Ints,
        order: Ints,
        forward: int,
        storage: Ints,
        at: Ints,
        is_read: Flags,
        begins: Flags,
        since: Ints,
    ) -> None:
        """Fill in what is spared at each step.

        Args:
            spared: zeros, filled in.
            order: the operations.
            forward: steps of the forward pass.
            storage, at, is_read: what is done with storages, by storage and step.
            begins: whether that is the first thing that is done with a storage.
            since: the step that made the copy; -1 for what was there before.
        """
        may, step = self._may[order], np.arange(len(order), dtype=np.int64)
        # Since when operations follow each other that may.
        begun = np.maximum.accumulate(np.where(may, 0, step + 1))
        follows = np.append(is_read[1:] & ~begins[1:], False)
        before = np.full(len(at), -1, dtype=np.int64)
        before[1:] = np.where(is_read[:-1] & ~begins[1:], at[:-1], -1)
        waited = (since < forward) & (forward <= at)
        dies = is_read & ~follows & (before < begun[at]) & ~waited & ~self._held[storage]
        dies &= (may & (self._made[order] > 0))[at]
        dying, when = storage[dies], at[dies]
        one = (self._made[order] == 1)[when]
        alike = one & (self._sizes[dying] == self._first[order][when])
        spared[when[alike]] = self._first[order][when[alike]]
        others: dict[int, list[int]] = {}
        for place, freed in zip(when[~one].tolist(), dying[~one].tolist(), strict=True):
            others.setdefault(place, []).append(freed)
        sizes = self._problem.sizes
        for place, freed_there in others.items():
            results = self._problem.writes[int(order[place])]
            spared[place] = shared_bytes((sizes[s] for s in results), (sizes[s] for s in freed_there))

    def _marks(self, storages: frozenset[int]) -> Flags:
        found = np.zeros(len(self._problem.sizes), dtype=np.bool_)
        found[list(storages)] = True
        return found


def shared_bytes(made: Iterable[int], dying: Iterable[int]) -> int:
    """The bytes of results that take the place of what dies, each of one of its own size; both in bytes each."""
    return sum((Counter(made) & Counter(dying)).elements())
