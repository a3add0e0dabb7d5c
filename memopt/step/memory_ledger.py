"""What the device holds for one model, and what a budget leaves of it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

import torch

from memopt.budget import Budget
from memopt.cuda_graphs.reserve import CaptureReserve
from memopt.memory.allocator import count_library_bytes, library_bytes, slack_bytes, use_expandable_segments, with_slack
from memopt.memory.products import may_multiply
from memopt.memory.resident import Resident
from memopt.program import Program
from memopt.step.call_role import CallRole
from memopt.step.reference import Reference


class MemoryLedger:
    """The memory of one model's steps.

    Attributes:
        budget: the limit that was asked for; None without one.
        margin: bytes of the budget that the allocator was seen to lose beyond the slack left to it.
        capture_reserve: what of the budget is left to CUDA graphs of the step.
        hold: told the budget in bytes before anything is run under it.
        reference: what a fraction is of, the same for all sessions of a model.
        role: of the latest call, in training.
        soft: whether the limit is eager's own peak and nobody asked for it: it is aimed at, and neither enforced nor
            refused.
        multiplies: whether any graph that was seen may have cuBLAS multiply, or was not all that there is of a call.
        alone: bytes above what is resident that the graph takes as it is which is being planned; None if not known.
        beyond: bytes that a step was seen to make the allocator hold; None if none was.
        code_fails: whether memory ran out in a step of the engine's own code that should keep the budget.
        naming: whether the budget is a minimum that is to be named, and is tried.
        broken: whether a graph was seen that is not all that there is of a call.
        in_call: whether a call of the model is running.
        older: bytes of outputs of earlier steps that the loop still holds: they are gone before backward is over, and
            planning takes its memory beside them.
        uncounted: bytes of other tensors of the process that the budget is not of.
    """

    def __init__(self, budget: Budget | None, resident: Resident) -> None:
        """Take the budget, and what is there before the first call."""
        self.budget = budget
        self.margin = 0
        self.capture_reserve = CaptureReserve()
        self.hold: Callable[[int], None] = _unheld
        self.older: Callable[[], int] = int
        self.uncounted: Callable[[], int] = int
        self.multiplies = self.broken = self.soft = self.in_call = False
        self.role = CallRole()
        self.reference = Reference()
        self.alone: int | None = None
        self.beyond: int | None = None
        self.code_fails = self.naming = False
        self._resident = resident
        self._arrived: Callable[[], Resident] | None = None

    @property
    def resident(self) -> Resident:
        """What the device holds during the whole step; counted when a graph is planned, not at every call."""
        if self._arrived is not None:
            self.resident = self._arrived()
        return self._resident

    @resident.setter
    def resident(self, resident: Resident) -> None:
        self._resident, self._arrived = resident, None

    @property
    def device(self) -> torch.device:
        """Where the model was when a graph was planned last: nothing is counted to know it."""
        return self._resident.device

    @contextlib.contextmanager
    def call(self, count: Callable[[], Resident], role: CallRole | None = None) -> Iterator[None]:
        """A call of the model, in which `count` may be asked for what is resident.

        Args:
            count: counts what is resident.
            role: of the call; None for that of the call before.
        """
        self.role = self.role if role is None else role
        self._arrived, self.in_call = count, True
        try:
            yield
        finally:
            self._arrived, self.in_call = None, False  # it holds the call's inputs

    def counts_resident(self, resident: Resident) -> None:
        """Take what is there during the whole step."""
        self.resident = resident

    def is_in_parts(self) -> None:
        """A graph is not all that there is of a call: what runs beside it may have cuBLAS multiply."""
        self.broken = self.multiplies = True

    def takes_alone(self, size: int) -> None:
        """The graph that is being planned takes so many bytes above what is resident, as it is."""
        self.alone = size

    def holds_beyond(self, size: int) -> None:
        """A step was seen to make the allocator hold so many bytes."""
        self.beyond = size

    def count_libraries(self, programs: Iterable[Program]) -> bool:
        """Count what libraries keep only where a graph may have them multiply, one of these or one seen before.

        Returns:
            Whether something else is counted now.
        """
        self.multiplies = self.multiplies or any(map(may_multiply, programs))
        before = libraries = self.resident.libraries
        if not self.multiplies:
            libraries = 0
        elif not before:  # they may have been left out for another graph of this call
            libraries = library_bytes(self.resident.device)
        self.resident = dataclasses.replace(self.resident, libraries=libraries)
        return libraries != before

    def keep_libraries(self, size: int) -> None:
        """Count so many bytes more as kept by libraries."""
        resident, self.multiplies = self.resident, True
        further = size - max(0, library_bytes(resident.device) - resident.libraries)
        if further > 0:  # else they were known, and left out
            count_library_bytes(resident.device, further)
        self.resident = dataclasses.replace(resident, libraries=resident.libraries + size)

    def limit(self, unconstrained_bytes: int) -> int | None:
        """The budget in bytes, for a step or a call that takes `unconstrained_bytes` without one.

        None without a budget, and as long as it is a fraction of a training step that is not captured yet.
        """
        if self.budget is None or (self.role.trains and self.budget.bytes is None and self.reference.training is None):
            return None
        return self.budget.resolve(unconstrained_bytes if self.soft else self.reference.of(unconstrained_bytes))

    def aim_at_eager(self) -> None:
        """Without a budget, aim at eager's own peak from now on: the user's checkpoints lower that."""
        if self.budget is None:
            self.budget, self.soft = Budget(None, 1.0, "the model's own peak"), True

    def waits_for_training(self, needed: int) -> bool:
        """Whether a call of inference that needs so many bytes is let do, as the fraction is of a step to come."""
        fraction = None if self.budget is None or self.reference.training is not None else self.budget.fraction
        if fraction is None or not self.role.to_be_trained:
            return False
        self.reference.infers(math.ceil(with_slack(needed, self.resident.device) / fraction) + 1)
        return True

    def usable(self, limit: int) -> int:
        """The bytes of a limit that tensors may take: what the allocator loses is left to it, and to CUDA graphs."""
        return limit - slack_bytes(limit, self.resident.device) - self.margin - self.capture_reserve.bytes

    @property
    def available(self) -> int | None:
        """Bytes that planning may take beside what is resident: operators that are timed, proofs; None for no limit.

        A fraction that is not fixed yet is taken of what the step was seen to take. Before there is a step, operators
        of a call of inference are run with as much as it takes as it is, weights included: what they need beside their
        operands is part of what the fraction is of.
        """
        if self.budget is None or self.soft:
            return None
        if self.budget.bytes is None and self.reference.training is None:
            if self.alone is None or not self.role.trains:
                return None if self.alone is None else self.resident.total + self.alone
            limit = self.budget.resolve(self.resident.total + self.alone)
        else:
            limit = self.budget.resolve(self.reference.of(0))
        return max(0, self.usable(limit) - self.resident.total - self.older())

    @property
    def planned_beside(self) -> int:
        """Bytes that what was planned last leaves to earlier calls of the step, and to parts that are not captured."""
        return self._resident.outside

    def optimizer_peak(self) -> int:
        """The most bytes from backward's end on: what is resident, gradients, a loss, what the step makes or sends."""
        if self.resident.optimizer is None:
            return 0
        held = self.resident.total - self.resident.gradients - self.resident.outside
        held += self.resident.coming_beside
        return held + self.resident.trainable + self.resident.loss + self.resident.beside_gradients

    def prepare_allocator(self) -> None:
        """Let a budget's memory be taken in segments that grow, before any is taken."""
        if self.budget is not None:
            use_expandable_segments(self.resident.device)


def _unheld(limit_bytes: int) -> None:
    return None
