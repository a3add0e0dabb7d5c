"""Search: steps from one decision to a better one, each played out exactly."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterable

import numpy as np

from memopt.solve.archive import Archive, State
from memopt.solve.gaps import GapFinder
from memopt.solve.liveness import Ints
from memopt.solve.rollout import FOREVER, Rollout
from memopt.solve.waits import AddedSeconds, SparedSeconds

_MOST = 1 << 30


@dataclasses.dataclass(frozen=True)
class Move:
    """End the wait of a storage in one gap, or let it wait there.

    Attributes:
        storage, start, end: the gap: the steps strictly between `start` and `end`.
        hold: what the storage's hold becomes; -1 where its forward copy's wait for backward changes instead.
        gain: what orders moves; the higher the better.
        anchors: storages whose forward copies shall wait so that the storage can be recomputed from them.
    """

    storage: int
    start: int
    end: int
    hold: int
    gain: float
    anchors: tuple[int, ...] = ()


class Search:
    """Moves between decisions; every decision ever played reaches the archive."""

    def __init__(self, rollout: Rollout, seconds: float, operations: float = float("inf")) -> None:
        """Take what bounds the search.

        Args:
            rollout: plays decisions out.
            seconds: time after which to stop, of this thread's processor: on a busy machine it finds the same plan.
            operations: how many operations may be played out in all; unlike the time the same on every machine.
        """
        self.rollout, self.archive = rollout, Archive()
        self.problem, self.finder = rollout.problem, GapFinder(rollout)
        self.sizes = rollout.sizes
        self.random = random.Random(0)
        self.own = np.array(
            [self.problem.costs[maker] if maker >= 0 else 0.0 for maker in self.problem.producer], dtype=np.float64
        )
        # Makes operations that cost nothing comparable by what they free.
        self.dust = max(self.problem.base_seconds, 1e-30) * 1e-9
        # The share of an ancestor's cost charged where it is recomputed anyway, but later: then it lives longer.
        self.early = 0.0
        self._end, self._operations = time.thread_time() + seconds, operations

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return self._operations < 0 or time.thread_time() > self._end

    def allow(self, operations: float) -> None:
        """Set how many operations may still be played out."""
        self._operations = operations

    def play(self, saved: list[bool], hold: list[int]) -> State:
        """Play a decision out and offer it to the archive."""
        state = State(saved, hold, self.rollout.play(saved, hold))
        self._operations -= len(state.outcome.steps)
        self.archive.offer(state)
        return state

    def fastest(self) -> State:
        """Return the decision that recomputes nothing."""
        problem = self.problem
        read_back = {storage for reads in problem.reads[problem.forward :] for storage in reads}
        return self.play([s in read_back for s in range(len(problem.sizes))], [FOREVER] * len(problem.sizes))

    def splice(self, early: State, late: State, cut: int) -> State:
        """Decide as `early` does for what the first `cut` operations make, and as `late` does for the rest."""
        chosen = [early if maker < cut else late for maker in self.problem.producer]
        saved = [state.saved[storage] for storage, state in enumerate(chosen)]
        return self.play(saved, [state.hold[storage] for storage, state in enumerate(chosen)])

    def squeeze(self, state: State, target: int, patience: int = 20) -> State:
        """End waits that free most above `target` for their price, until the peak is there or nothing helps."""
        tabu: set[tuple[int, int]] = set()
        limit, moves = _MOST, self.evictions(state, target)
        while state.peak > target and not self.late and len(tabu) < patience:
            moves = [move for move in moves if (move.storage, move.hold) not in tabu]
            chosen = self._choose(state, moves, target, limit)
            if not chosen:
                break
            after = self.apply(state, chosen, False)
            if _excess(after, target) < _excess(state, target):
                state, limit = after, max(4, 2 * limit)
                moves = self.evictions(state, target)
            elif len(chosen) == 1:
                tabu.add((chosen[0].storage, chosen[0].hold))
            else:
                limit = len(chosen) // 2
        return state

    def relax(self, state: State, target: int, patience: int = 8) -> State:
        """Let copies wait that then need not be recomputed, while the peak stays within `target`."""
        tabu: set[tuple[int, int]] = set()
        limit, moves = _MOST, self.refills(state, target)
        while not self.late and len(tabu) < patience:
            moves = [move for move in moves if (move.storage, move.hold) not in tabu]
            chosen = self._fit(state, moves, target, limit)
            if not chosen:
                break
            after = self.apply(state, chosen, True)
            if after.peak <= target and after.seconds < state.seconds:
                state, limit = after, max(4, 2 * limit)
                moves = self.refills(state, target)
            elif len(chosen) == 1:
                tabu.add((chosen[0].storage, chosen[0].hold))
            else:
                limit = len(chosen) // 2
        return state

    def apply(self, state: State, moves: Iterable[Move], wait: bool) -> State:
        """Play the state with moves that begin waits, or end them."""
        saved, hold = list(state.saved), list(state.hold)
        for move in moves:
            if move.hold < 0:
                saved[move.storage] = wait
            else:
                hold[move.storage] = max(hold[move.storage], move.hold) if wait else min(hold[move.storage], move.hold)
            for anchor in move.anchors:
                saved[anchor] = True
        return self.play(saved, hold)

    def evictions(self, state: State, target: int, most: int = 200) -> list[Move]:
        """Return moves that end waits at moments above `target` bytes, best bytes · steps per second first."""
        outcome, gaps = state.outcome, self.finder.find(state.outcome)
        above = np.concatenate([[0], np.cumsum(outcome.live > target)])
        steps = (above[gaps.end] - above[gaps.start + 1]) * gaps.waits
        bases = np.searchsorted(outcome.bases, gaps.end) - np.searchsorted(outcome.bases, gaps.start)
        crossing = gaps.start < self.problem.forward
        steps[~crossing & (bases < 1)] = 0  # a copy cannot be dropped and recomputed for one and the same operation
        benefit = self.sizes[gaps.storage] * steps
        candidates = np.flatnonzero(benefit > 0)
        score = benefit[candidates] / (self.own[gaps.storage[candidates]] + self.dust)
        price = AddedSeconds(self.rollout, state, gaps, self.early)
        moves = []
        for at in candidates[np.argsort(-score, kind="stable")][:most].tolist():
            storage, start, end = int(gaps.storage[at]), int(gaps.start[at]), int(gaps.end[at])
            if not crossing[at]:
                cost = price.of(storage, end, False) + self.dust
                moves.append(Move(storage, start, end, int(bases[at]) - 1, float(benefit[at]) / cost))
                continue
            gain = float(benefit[at]) / (price.of(storage, end, True) + self.dust)
            anchors = price.missing(storage, end)
            net = int(self.sizes[storage]) - sum(int(self.sizes[anchor]) for anchor in anchors)
            anchored = net * int(steps[at]) / (float(self.own[storage]) + self.dust)
            if not anchors or anchored <= gain:
                moves.append(Move(storage, start, end, -1, gain))
            else:
                moves.append(Move(storage, start, end, -1, anchored, anchors))
        moves.sort(key=lambda move: -move.gain)
        return moves

    def refills(self, state: State, target: int, most: int = 300) -> list[Move]:
        """Return moves that spare recomputations and fit below `target` bytes, best seconds per byte · step first."""
        outcome, gaps = state.outcome, self.finder.find(state.outcome)
        spared = SparedSeconds(self.rollout, state, gaps)
        bases = np.searchsorted(outcome.bases, gaps.end) - np.searchsorted(outcome.bases, gaps.start)
        candidates = np.flatnonzero(gaps.waits == 0)
        score = self.own[gaps.storage[candidates]] / (self.sizes[gaps.storage[candidates]] + 1)
        moves = []
        for at in candidates[np.argsort(-score, kind="stable")][:most].tolist():
            storage, start, end = int(gaps.storage[at]), int(gaps.start[at]), int(gaps.end[at])
            size, gain = int(self.sizes[storage]), spared.of(storage)
            if gain <= 0 or (end > start + 1 and int(outcome.live[start + 1 : end].max()) + size > target):
                continue
            hold = -1 if start < self.problem.forward else int(bases[at])
            moves.append(Move(storage, start, end, hold, gain / (size * (end - start) + 1)))
        moves.sort(key=lambda move: -move.gain)
        return moves

    def _choose(self, state: State, moves: list[Move], target: int, limit: int) -> list[Move]:
        live, chosen = state.outcome.live.copy(), list[Move]()
        for move in moves:
            if len(chosen) >= limit or live.max() <= target:
                break
            stretch = live[move.start + 1 : move.end]
            if stretch.max() > target:
                stretch -= self.sizes[move.storage] - self.sizes[list(move.anchors)].sum()
                chosen.append(move)
        return chosen

    def _fit(self, state: State, moves: list[Move], target: int, limit: int) -> list[Move]:
        live, chosen = state.outcome.live.copy(), list[Move]()
        for move in moves:
            if len(chosen) >= limit:
                break
            stretch = live[move.start + 1 : move.end]
            if not len(stretch) or int(stretch.max()) + self.sizes[move.storage] <= target:
                stretch += self.sizes[move.storage]
                chosen.append(move)
        return chosen


def _excess(state: State, target: int) -> int:
    over: Ints = np.maximum(state.outcome.live - target, 0)
    return int(over.sum())
