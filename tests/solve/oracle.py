"""Exact answers for tiny steps, by shortest paths over (next operation, set of storages alive)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from memopt.solve.problem import StepProblem

State = tuple[int, frozenset[int]]


def least_peak(problem: StepProblem) -> int:
    """Return the least peak of any schedule (a pinned storage's later copies count only while they are made)."""
    return int(_shortest(problem, lambda so_far, step_bytes, _: max(so_far, step_bytes)) or 0)


def least_seconds(problem: StepProblem, limit: int) -> float | None:
    """Return the seconds of the fastest schedule within `limit` bytes, or None."""
    return _shortest(problem, lambda so_far, step_bytes, cost: so_far + cost if step_bytes <= limit else None)


def _shortest(problem: StepProblem, extend) -> float | None:
    start: State = (0, frozenset())
    best, queue, order = {start: 0.0}, [(0.0, 0, start)], 1
    while queue:
        value, _, state = heapq.heappop(queue)
        if value > best[state]:
            continue
        if state[0] == len(problem.reads):
            return value
        for after, step_bytes, cost in _steps(problem, *state):
            reached = value if step_bytes < 0 else extend(value, step_bytes, cost)
            if reached is not None and reached < best.get(after, float("inf")):
                best[after] = reached
                heapq.heappush(queue, (reached, order, after))
                order += 1
    return None


def _steps(problem: StepProblem, position: int, alive: frozenset[int]) -> Iterator[tuple[State, int, float]]:
    for storage in alive - problem.pinned:
        yield (position, alive - {storage}), -1, 0.0
    backward = position >= problem.forward
    always = problem.resident | (problem.arriving if backward else frozenset())
    arrived = sum(problem.sizes[storage] for storage in problem.arriving) if backward else 0
    again = [operation for operation in range(position) if problem.recomputable[operation]] if backward else []
    for operation in (position, *again):
        if set(problem.reads[operation]) <= alive | always:
            after = alive.union(problem.writes[operation])
            twice = sum(problem.sizes[s] for s in problem.writes[operation] if s in alive & problem.pinned)
            bytes_ = sum(problem.sizes[storage] for storage in after) + twice + arrived + problem.workspace[operation]
            yield (position + (operation == position), after), bytes_, problem.costs[operation]
