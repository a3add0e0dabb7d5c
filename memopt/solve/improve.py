"""Improve: change part of the best decision known at random, repair it, and keep what is better."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from memopt.solve.archive import State
from memopt.solve.rollout import FOREVER
from memopt.solve.search import Search

_HOLDS = (0, 4, 16, 64, FOREVER)
_FLOOR_SHARE = 0.15  # share of rounds that look for a lower floor
_DEEPER = 0.98  # where no state keeps a level, the peak to try for, in shares of the least peak known


class Improver:
    """Ruins and repairs the best states of a search."""

    def __init__(self, search: Search) -> None:
        self._search, self._random = search, search.random
        self._twins = _twins(search)
        # A change that has helped often is drawn more often.
        self._kinds: list[Callable[[State, int], State]] = [
            self._drop_twins,
            self._save_twins,
            self._end_waits,
            self._begin_waits,
            self._mix,
            self._shorten_holds,
        ]
        self._weights = [1.0] * len(self._kinds)

    def run(self, levels: Sequence[int], patience: int) -> None:
        """Improve at random levels and the floor until the search is late or `patience` rounds in a row are vain."""
        idle = 0
        while idle < patience and not self._search.late and self._twins:
            idle = (
                0
                if self._round(self._random.choice(levels) if self._random.random() > _FLOOR_SHARE else 0)
                else idle + 1
            )

    def _round(self, level: int) -> bool:
        search, archive = self._search, self._search.archive
        state = archive.best(level)
        if state is None:
            state = archive.states[0]
            level = max(level, int(state.peak * _DEEPER))
        kind = self._random.choices(range(len(self._kinds)), self._weights)[0]
        search.early = self._random.choice((0.0, 0.0, 0.3, 1.0))
        ruined = self._kinds[kind](state, level)
        repaired = search.squeeze(ruined, level, patience=8)
        if repaired.peak <= level:
            search.relax(repaired, level, patience=4)
        better = archive.best(level) or archive.states[0]
        won = better is not state
        self._weights[kind] = max(0.1, 0.97 * self._weights[kind] + 0.3 * won)
        return won

    def _stretch(self) -> list[int]:
        twins = self._random.choice(self._twins)
        start = self._random.randrange(len(twins))
        return twins[start : start + 1 + int((len(twins) - start) * self._random.random() ** 2)]

    def _drop_twins(self, state: State, level: int) -> State:
        saved = list(state.saved)
        for storage in self._stretch():
            saved[storage] = False
        return self._search.play(saved, state.hold)

    def _save_twins(self, state: State, level: int) -> State:
        saved = list(state.saved)
        for storage in self._stretch():
            saved[storage] = True
        return self._search.play(saved, state.hold)

    def _end_waits(self, state: State, level: int) -> State:
        moves = self._search.evictions(state, int(level * 0.9), 50)
        return self._search.apply(
            state, self._random.sample(moves, min(len(moves), self._random.choice((1, 2, 4, 8)))), False
        )

    def _begin_waits(self, state: State, level: int) -> State:
        moves = self._search.refills(state, 1 << 62, 100)
        return self._search.apply(
            state, self._random.sample(moves, min(len(moves), self._random.choice((1, 2, 4, 8)))), True
        )

    def _mix(self, state: State, level: int) -> State:
        other = self._random.choice(self._search.archive.states)
        pair = (state, other) if self._random.random() < 0.5 else (other, state)
        return self._search.splice(*pair, self._random.randrange(self._search.problem.forward + 1))

    def _shorten_holds(self, state: State, level: int) -> State:
        hold, days = list(state.hold), self._random.choice(_HOLDS)
        for storage in self._stretch():
            hold[storage] = days
        return self._search.play(state.saved, hold)


def _twins(search: Search) -> list[list[int]]:
    """Group the storages that may be recomputed by how alike they are made and read: blocks that repeat line up."""
    problem, groups = search.problem, defaultdict[object, list[int]](list)
    readers = Counter(read for reads in problem.reads for read in reads)
    for storage, maker in enumerate(problem.producer):
        if 0 <= maker < problem.forward and not search.rollout.fixed[storage] and problem.sizes[storage]:
            made_from = tuple(sorted(problem.sizes[read] for read in problem.reads[maker]))
            key = (problem.sizes[storage], problem.costs[maker], problem.writes[maker].index(storage), made_from)
            groups[key, readers[storage]].append(storage)
    return list(groups.values())
