"""Descend: from what prices suggest down to the floor, and then level by level, joining and squeezing what is known."""

from __future__ import annotations

from memopt.solve.archive import State
from memopt.solve.pricing import ascend, ladder
from memopt.solve.search import Search

_LEVEL = 0.96  # bytes of each level over those of the level above
_SLIDE = 0.95  # the same for the first way down


def seed(search: Search) -> None:
    """Play the decision that recomputes nothing, and what is worth saving at rising prices."""
    state = search.fastest()
    for lateness in (0.03, 0.3, 1.0):
        ladder(search, lateness, growth=1.3)
    if state.peak and search.problem.forward < len(search.problem.reads):
        ascend(search, state, slack=0.2, growth=1.1)


def slide(search: Search, dearest: float) -> None:
    """Squeeze and relax from the fastest state on, never turning to another, until `dearest` seconds or the floor.

    Once with what is recomputed early charged in full, which spreads what is saved and reaches the lower floor, and
    once with it free, which is cheaper on the way.
    """
    fastest = search.archive.states[-1]
    for search.early in (1.0, 0.0):
        state, target = fastest, fastest.peak
        while not search.late and state.seconds <= dearest:
            target = int(min(target * _SLIDE, state.peak * 0.999))
            squeezed = search.squeeze(state, target, patience=40)
            if squeezed.peak >= state.peak:
                break
            state = search.relax(squeezed, max(squeezed.peak, target), patience=12)


def refine(search: Search, limit: int, dearest: float) -> list[int]:
    """Work on levels from the top down to `limit` bytes, `dearest` seconds or the floor; return them in bytes."""
    top, levels = search.archive.states[-1].peak, list[int]()
    floor = max(limit, search.archive.states[0].peak, 1)
    while not levels or levels[-1] > floor:
        levels.append(max(floor, int(top * _LEVEL ** (len(levels) + 1))))
    # Every eighth level first, then those between: whenever time ends, the whole range has been worked on alike.
    order = sorted(range(len(levels)), key=lambda at: min(3, (at & -at).bit_length() - 1) if at else 3, reverse=True)
    for at in order:
        state = search.archive.best(levels[at])
        if search.late:
            break
        if state is None or state.seconds <= dearest:
            work_on(search, levels[at])
    return levels


def work_on(search: Search, level: int) -> None:
    """Look for a faster state within `level` bytes: join the neighbours, squeeze the one above, relax what is found."""
    archive = search.archive
    _join(search, level)
    above = next((state for state in archive.states if state.peak > level), None)
    if above is not None:
        search.early = 0.0
        squeezed = search.squeeze(above, level)
        if squeezed.peak <= level:
            search.relax(squeezed, level)
    best = archive.best(level)
    if best is not None:
        search.relax(best, level)


def _join(search: Search, target: int) -> None:
    """Between the neighbours above and below `target`, find how much of the lower one is enough, from either end."""
    states = search.archive.states
    below = sum(state.peak <= target for state in states)
    if not 0 < below < len(states):
        return
    low, high = states[below - 1], states[below]  # what is found first may displace others
    for low_first in (True, False):
        _relax_join(search, low, high, target, low_first)


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
    if best is not low:
        search.relax(best, target)
