"""Search for decisions: which forward copies wait for backward, and how long recomputed ones are kept."""

from __future__ import annotations

import time

import numpy as np

from memopt.solve.archive import Archive
from memopt.solve.rollout import FOREVER, Outcome, Rollout


def descend(rollout: Rollout, archive: Archive, deadline: float) -> None:
    """From keeping everything, drop what frees most for its price at the peak, batch by batch, until nothing helps."""
    problem = rollout.problem
    saved, hold = [True] * len(problem.sizes), [FOREVER] * len(problem.sizes)
    read_back = {storage for reads in problem.reads[problem.forward :] for storage in reads}
    saved = [storage in read_back for storage in range(len(problem.sizes))]
    while time.monotonic() < deadline:
        outcome = rollout.play(saved, hold)
        archive.offer(outcome)
        candidates = _crossing_peak(rollout, outcome, saved)
        if not candidates:
            return
        prices = {storage: _price(rollout, storage, saved) for storage in candidates}
        candidates.sort(key=lambda storage: prices[storage] / max(1, problem.sizes[storage]))
        for storage in candidates[: 1 + len(candidates) // 16]:
            saved[storage] = False


def _crossing_peak(rollout: Rollout, outcome: Outcome, saved: list[bool]) -> list[int]:
    first = slice(0, len(saved))
    spans = (outcome.born[first] <= outcome.peak_step) & (
        outcome.last[first] >= max(outcome.peak_step, rollout.problem.forward)
    )
    return [int(s) for s in np.flatnonzero(spans) if saved[s] and not rollout.fixed[s] and rollout.sizes[s]]


def _price(rollout: Rollout, storage: int, saved: list[bool]) -> float:
    problem, price, seen = rollout.problem, 0.0, set[int]()
    stack = [problem.producer[storage]]
    while stack:
        operation = stack.pop()
        if operation in seen:
            continue
        seen.add(operation)
        price += problem.costs[operation]
        stack.extend(problem.producer[s] for s in problem.reads[operation] if not saved[s] and not rollout.fixed[s])
    return price
