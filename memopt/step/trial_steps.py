"""Trial steps of one compiled graph: what it takes of the device, without the allocator's limit and within it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memopt.capture.dynamo import Hooks
from memopt.capture.let_go import numbers_alone
from memopt.common.phases import phase
from memopt.common.progress import stage
from memopt.memory.allocator import allocated_after_gc
from memopt.memory.allocator_limit import grow
from memopt.memory.resident import Resident
from memopt.step.oom_retry import patiently
from memopt.step.trial_step import Short, TrialMemory, lacked, take_step


@dataclasses.dataclass(frozen=True)
class Held:
    """How the step runs where the allocator is held to the budget.

    Attributes:
        cache_bytes: what the allocator holds when the step begins, the optimizer's state included.
        full_speed: whether it never has to hand back what it caches.
    """

    cache_bytes: int
    full_speed: bool


@dataclasses.dataclass(frozen=True)
class TrialSteps:
    """Takes steps of a compiled graph that let go of outputs and gradients as the caller's loop does.

    Attributes:
        run: runs the graph.
        hooks: of the graph.
        given: the caller's arguments.
        written: positions of those that the step writes to.
        resident: what the device holds during the whole step.
    """

    run: Callable[..., Any]
    hooks: Hooks
    given: Sequence[Any]
    written: frozenset[int]
    resident: Resident

    def free(self, allowed: int) -> TrialMemory | Short:
        """What a step takes where the allocator is not held to the `allowed` bytes."""
        stage("taking a step")
        with phase("trial steps"):
            return patiently(self._step, self.resident.device, allowed)

    def held(self, free: TrialMemory, allowed: int) -> Held | Short:
        """How the step runs where the allocator is held to `allowed` bytes, or what it lacks.

        Where blocks lie decides whether the next one fits: a step that is let reserve less than the limit may run out
        of memory under it all the same, and one that would reserve more may come to terms with what there is. So the
        steps begin as the caller's will: nothing of an earlier one in the way, and the cache taken in one piece.

        Args:
            free: what the step took without the limit.
            allowed: the limit in bytes.
        """
        return patiently(functools.partial(self._held, free, allowed), self.resident.device, allowed)

    def _held(self, free: TrialMemory, allowed: int) -> Held | Short:
        device, coming = self.resident.device, self.resident.coming
        if free.allocated_bytes + coming > allowed:
            return Short(free.allocated_bytes + coming - allowed)
        found: Held | Short = Short()
        for size in dict.fromkeys((min(allowed, free.reserved_bytes + coming), allowed)):
            with phase("trial steps"):
                taken = self._step_beside_state(size)
                begin_anew(device, size)
            if isinstance(taken, TrialMemory) and not taken.retries:
                return Held(size, True)
            if isinstance(found, Short):
                found = taken if isinstance(taken, Short) else Held(size, False)
        return found

    def _step_beside_state(self, size: int) -> TrialMemory | Short:
        """A step within the limit, with room taken for the optimizer's state that is not there yet."""
        device = self.resident.device
        try:
            state = torch.empty(self.resident.coming, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            return lacked(error, device, True)
        begin_anew(device, size)
        taken = self._step(held=True)
        del state
        return taken

    def _step(self, *, held: bool = False) -> TrialMemory | Short:
        run = numbers_alone(self.run) if self.hooks.lets_go else self.run
        dropped = self.hooks.dropped(self.hooks.handed.gone)
        return take_step(run, self.given, self.written, self.resident.device, dropped=dropped, held=held)


def begin_anew(device: torch.device, size: int) -> None:
    """Let the allocator hold `size` bytes: what is in use, and the rest in one piece.

    Buffers of libraries would lie between pages that are handed back, and keep parts of them.
    """
    allocated_after_gc(device)
    torch.cuda.empty_cache()
    grow(device, size)
