"""Pricing: put a rising price on bytes, and let a minimum cut choose what is worth saving at each."""

from __future__ import annotations

import numpy as np

from memopt.solve.archive import State
from memopt.solve.cut import SavingCut
from memopt.solve.liveness import Ints
from memopt.solve.rollout import FOREVER, Rollout
from memopt.solve.search import Search

_CHEAPEST, _DEAREST = 1e-2, 1e2  # prices tried, in shares of forward's seconds over the bytes that cross to backward


def ladder(search: Search, lateness: float, growth: float) -> None:
    """Play what is worth saving at prices that grow by the factor `growth`.

    A byte that is first needed at the very end of backward costs 1, one needed at its very start 1 - `lateness`:
    with lateness the early layers go first, whose copies would wait longest.
    """
    first = _first_needs(search.rollout)
    weight = search.sizes * (1 - lateness + lateness * first / max(1, int(first.max(initial=1))))
    cut, hold = SavingCut(search.rollout), [FOREVER] * len(search.sizes)
    fair = _fair_price(search, cut)
    price, last = _CHEAPEST * fair, list[bool]()
    while price < _DEAREST * fair and not search.late:
        saved = cut.solve((price * weight).tolist())
        if saved != last:
            search.play(saved, hold)
        price, last = price * growth, saved


def ascend(search: Search, state: State, slack: float, growth: float) -> None:
    """Play what is worth saving at prices that rise where it hurts.

    Each round prices the moments above (1 - slack) of the last peak, by the bytes above; a storage pays for all moments
    until it is first needed. All prices together grow by the factor `growth` a round.
    """
    problem, rollout = search.problem, search.rollout
    cut, first, hold = SavingCut(rollout), _first_needs(rollout), [FOREVER] * len(search.sizes)
    fair = _fair_price(search, cut) * (growth - 1)
    total = _CHEAPEST * fair
    price = np.zeros(len(problem.reads) - problem.forward + 1, dtype=np.float64)
    while total < _DEAREST * fair and not search.late:
        outcome = state.outcome
        starts = np.concatenate([[problem.forward], outcome.bases[:-1] + 1])
        high = np.maximum.reduceat(outcome.live, starts)
        high[0] = max(high[0], outcome.live[: problem.forward].max(initial=0))
        over = np.maximum(high - int(state.peak * (1 - slack)), 0).astype(np.float64)
        price[:-1] += total * over / over.sum()
        total *= growth
        saved = cut.solve((search.sizes * np.cumsum(price)[first]).tolist())
        if saved != state.saved:
            state = search.play(saved, hold)


def _fair_price(search: Search, cut: SavingCut) -> float:
    crossing = int(search.sizes[sorted(cut.needed)].sum())
    return sum(search.problem.costs[: search.problem.forward]) / crossing if crossing else 0.0


def _first_needs(rollout: Rollout) -> Ints:
    """Return per storage the first backward operation that needs it, be it only to recompute something else.

    Operations count from the start of backward; their number stands where nothing needs the storage.
    """
    problem = rollout.problem
    never = len(problem.reads) - problem.forward
    first = [never] * len(problem.sizes)
    for operation in reversed(range(len(problem.reads))):
        if operation >= problem.forward:
            when = operation - problem.forward
        else:
            when = min((first[write] for write in problem.writes[operation]), default=never)
        for read in problem.reads[operation]:
            first[read] = min(first[read], when)
    return np.array(first, dtype=np.int64)
