"""The floor of a step in which results take the place of what they are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memopt.solve.problem import StepProblem
from memopt.solve.recompute import Plan, sunk
from memopt.solve.schedule import simulate


def in_place_floor(problem: StepProblem, over: Sequence[tuple[int, int]], *, seconds: float = 4.0) -> Plan | None:
    """The plan with the least peak where results lie in the memory of what they are made of.

    `curve` counts a result beside what it is made of: of two plans that are equal so, the one whose peak is where a
    result takes no place of its own needs less once it is finished.

    Args:
        problem: the step in numbers.
        over: storages of results, each with that of an operand of the same size which nothing else reads.
        seconds: for the search, of one core.

    Returns:
        A plan, with its peak as `simulate` counts it for the problem as given; None where nothing can be shared.
    """
    if not over:
        return None
    schedule = sunk(shared(problem, over), seconds)
    taken = simulate(problem, schedule)
    return Plan(schedule, taken.peak_bytes, taken.seconds, taken.seconds - problem.base_seconds, taken.peak_bytes, True)


def shared(problem: StepProblem, over: Sequence[tuple[int, int]]) -> StepProblem:
    """The same step in which results are written over what they are made of, and neither is recomputed.

    Args:
        problem: the step in numbers.
        over: as for `in_place_floor`; a result may be another's operand.
    """
    base = list(range(len(problem.sizes)))
    for result, operand in sorted(over, key=lambda pair: problem.producer[pair[0]]):
        base[result] = base[operand]
    gone = {result for result, _ in over}
    once = {problem.producer[storage] for pair in over for storage in pair}
    return dataclasses.replace(
        problem,
        reads=tuple(tuple(dict.fromkeys(base[storage] for storage in reads)) for reads in problem.reads),
        writes=tuple(tuple(storage for storage in writes if storage not in gone) for writes in problem.writes),
        recomputable=tuple(may and at not in once for at, may in enumerate(problem.recomputable)),
        pinned=frozenset(base[storage] for storage in problem.pinned),
    )
