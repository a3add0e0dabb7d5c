"""A proven lower bound on the peak of every schedule of a step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memopt.solve.problem import StepProblem


def lower_bound(problem: StepProblem) -> int:
    """Return bytes that no schedule can stay below.

    Every operation runs a first time, with its inputs, outputs and workspace. Beside them at that moment there are
    (a) in forward, what a later forward operation reads, since forward runs once and in order; (b) pinned copies that
    exist by then: made earlier in forward, or by an operation that must have run; (c) copies that cannot be recomputed
    and that an operation which must still run reads; (d) in backward, what arrives.
    """
    operations, forward = len(problem.reads), problem.forward
    if not operations:
        return 0
    before = _ancestors(problem)
    readers: list[list[int]] = [[] for _ in problem.sizes]
    for operation, reads in enumerate(problem.reads):
        for storage in reads:
            readers[storage].append(operation)
    total = np.array(problem.workspace, dtype=np.int64)
    total[forward:] += sum(problem.sizes[storage] for storage in problem.arriving)
    for storage, maker in enumerate(problem.producer):
        if maker < 0:
            continue
        must: npt.NDArray[np.bool_] = np.zeros(
            operations, dtype=np.bool_
        )  # operations whose first run certainly has `storage` beside it
        must[[maker, *readers[storage]]] = True
        exists = before[:, maker].copy()  # operations that can only run once `storage` exists
        if maker < forward:
            exists[maker + 1 :] = True
            must[maker : max((reader for reader in readers[storage] if reader < forward), default=maker)] = True
        if storage in problem.pinned:
            np.logical_or(must, exists, out=must)
        elif not problem.recomputable[maker]:
            awaited = np.logical_or.reduce(
                before[readers[storage]], axis=0
            )  # operations that must have run before one that reads it
            if any(reader >= forward for reader in readers[storage]):
                awaited[:forward] = True
            np.logical_or(must, exists & awaited, out=must)
        total[must] += problem.sizes[storage]
    return int(total.max())


def _ancestors(problem: StepProblem) -> npt.NDArray[np.bool_]:
    """Return a matrix whose row o marks the operations that must have run before operation o does."""
    before = np.zeros((len(problem.reads), len(problem.reads)), dtype=np.bool_)
    for operation, reads in enumerate(problem.reads):
        for maker in {problem.producer[storage] for storage in reads} - {-1}:
            before[operation] |= before[maker]
            before[operation, maker] = True
    return before
