"""Descend: from what prices suggest down to the floor, level by level, joining and squeezing what is known."""

from __future__ import annotations

from memopt.solve.archive import State
from memopt.solve.pricing import ascend, ladder
from memopt.solve.search import Search

_LEVEL = 0.96  # bytes of each level over those of the level before
_FLOOR = 0.99  # bytes to try for below the least peak known, in shares of it


def seed(search: Search) -> None:
    """Play the decision that recomputes nothing, and what is worth saving at rising prices."""
    state = search.fastest()
    for lateness in (0.03, 0.3, 1.0):
        ladder(search, lateness, growth=1.3)
    if state.peak and search.problem.forward < len(search.problem.reads):
        ascend(search, state, slack=0.2, growth=1.1)


def descend(search: Search, limit: int, dearest: float) -> list[int]:
    """Work down to `limit` bytes, to `dearest` seconds or to the floor; return the levels' bytes, falling."""
    archive = search.archive
    state = archive.states[-1]
    target, levels = state.peak, [state.peak]
    while not search.late and target > limit and state.seconds <= dearest:
        target = max(int(target * _LEVEL), limit)
        _join(search, target)
        for early in (0.0, 1.0):
            search.early = early
            squeezed = search.squeeze(state, target)
            if squeezed.peak <= target:
                search.relax(squeezed, target)
        best = archive.best(target)
        if best is None:
            floor = archive.states[0]
            search.squeeze(floor, int(floor.peak * _FLOOR))
            best = archive.states[0]
            if best.peak == floor.peak:
                break
            target = max(best.peak, limit)
        state = search.relax(best, target)
        levels.append(target)
    return levels


def _join(search: Search, target: int) -> None:
    """Between the neighbours above and below `target`, find how much of the lower one is enough, from either end."""
    states = search.archive.states
    below = sum(state.peak <= target for state in states)
    if not 0 < below < len(states):
        return
    low = states[below - 1]
    for high in {id(state): state for state in (states[below], states[min(below + 3, len(states) - 1)])}.values():
        _relax_join(search, low, high, target, low_first=True)
        _relax_join(search, low, high, target, low_first=False)


def _relax_join(search: Search, low: State, high: State, target: int, low_first: bool) -> None:
    best, enough, short = low, search.problem.forward, 0
    while enough - short > max(1, search.problem.forward // 128) and not search.late:
        middle = (enough + short) // 2
        if low_first:
            state = search.splice(low, high, middle)
        else:
            state = search.splice(high, low, search.problem.forward - middle)
        if state.peak <= target:
            best, enough = state, middle
        else:
            short = middle
    search.relax(best, target)
