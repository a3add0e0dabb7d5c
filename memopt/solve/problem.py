"""StepProblem: one training step in plain numbers, the input of every solver that decides what to recompute."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence


class ProblemError(ValueError):
    """The numbers do not describe a step: lengths differ, an index is out of range, a read comes before its write."""


@dataclasses.dataclass(frozen=True)
class StepProblem:
    """One training step in plain numbers: operations in their order of execution, storages with bytes.

    Attributes:
        sizes: bytes of each storage.
        reads: per operation, the storages that it reads (distinct).
        writes: per operation, the storages that it creates (none, one or several; a storage has at most one producer).
        costs: per operation, seconds (>= 0).
        workspace: per operation, bytes that it needs only while it runs.
        forward: operations[:forward] are the forward pass, the rest the backward pass.
        recomputable: per operation, whether it may run again during backward.
        pinned: storages that stay alive from creation to the end (outputs held by the caller, gradients).
        resident: storages without producer that are alive during the whole step; their bytes are not counted.
        arriving: storages without producer that appear when backward starts and stay to the end; they are counted.

    Raises:
        ProblemError: the numbers contradict each other; the message names the operation or the storage.
    """

    sizes: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    costs: tuple[float, ...]
    workspace: tuple[int, ...]
    forward: int
    recomputable: tuple[bool, ...]
    pinned: frozenset[int] = frozenset()
    resident: frozenset[int] = frozenset()
    arriving: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        operations = len(self.reads)
        for name in ("writes", "costs", "workspace", "recomputable"):
            if len(getattr(self, name)) != operations:
                raise ProblemError(f"{name} has {len(getattr(self, name))} entries for {operations} operations")
        if not 0 <= self.forward <= operations:
            raise ProblemError(f"forward is {self.forward}, not within 0..{operations}")
        if any(size < 0 for size in (*self.sizes, *self.workspace)):
            raise ProblemError("a size or a workspace is negative")
        if not all(0 <= cost < float("inf") for cost in self.costs):
            raise ProblemError("a cost is negative or not finite")
        if self.resident & self.arriving:
            raise ProblemError(f"storages both resident and arriving: {sorted(self.resident & self.arriving)}")
        written: set[int] = set(self.resident)
        every = set(range(len(self.sizes)))
        if not (self.pinned | self.resident | self.arriving) <= every:
            raise ProblemError("pinned, resident or arriving names a storage that does not exist")
        for operation in range(operations):
            if operation == self.forward:
                written |= self.arriving
            self._check_operation(operation, written)
            written.update(self.writes[operation])

    def _check_operation(self, operation: int, written: set[int]) -> None:
        reads, writes = self.reads[operation], self.writes[operation]
        _check_distinct(operation, reads)
        _check_distinct(operation, writes)
        for storage in reads:
            if storage not in written:
                raise ProblemError(f"operation {operation} reads storage {storage} before it exists")
        for storage in writes:
            if not 0 <= storage < len(self.sizes):
                raise ProblemError(f"operation {operation} writes storage {storage}, which does not exist")
            if storage in written or storage in self.arriving:
                raise ProblemError(f"operation {operation} writes storage {storage}, which has a producer already")

    @functools.cached_property
    def producer(self) -> tuple[int, ...]:
        """Per storage, the operation that creates it; -1 for resident, arriving and unused ones."""
        producer = [-1] * len(self.sizes)
        for operation, writes in enumerate(self.writes):
            for storage in writes:
                producer[storage] = operation
        return tuple(producer)

    @functools.cached_property
    def base_seconds(self) -> float:
        """Seconds of the step with nothing recomputed."""
        return math.fsum(self.costs)


def _check_distinct(operation: int, storages: Sequence[int]) -> None:
    if len(set(storages)) != len(storages):
        raise ProblemError(f"operation {operation} names a storage twice: {tuple(storages)}")
