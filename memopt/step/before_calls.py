"""What a loop runs between an optimizer's step and the next call of a model: a teacher, say, or the next batch.

Or between a call without gradients and what comes next: a discriminator that trains on what a generator has made.

No plan makes that less, but a budget in bytes is of all that the process holds, whoever holds it.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memopt.common.garbage import collect
from memopt.memory.allocator_events import Recording, is_profiled
from memopt.memory.distributed import has_group
from memopt.memory.live_tensors import live_blocks
from memopt.memory.window import unseen
from memopt.step.observed_steps import FIRST_STEPS


class BeforeCalls:
    """Looks at the allocator before the calls of all models of the process that have a budget in bytes."""

    def __init__(self) -> None:
        """Nothing is to be looked at."""
        self._device: torch.device | None = None
        self._owner: weakref.ref[object] | None = None
        self._looks: dict[bool, weakref.WeakKeyDictionary[object, int]] = {  # by owner; behind a step, or behind a call
            behind_step: weakref.WeakKeyDictionary() for behind_step in (True, False)
        }
        self._steps, self._expected = 0, 1  # of optimizers since the last call, and in all before the next one
        self._within = False  # whether the present step of an optimizer has begun in a look
        self._look: _OnCpu | _OnCuda | None = None
        self._behind_step, self._most = True, 0  # what the look is behind; what a look has seen that a step has ended
        self._hooked = False

    def expect(self, device: torch.device, owner: object) -> None:
        """A call with gradients has returned: what comes once its optimizers have stepped is to be looked at.

        Args:
            device: whose allocator is looked at.
            owner: of the calls; the first few looks for each are all that there are.
        """
        self._device, self._owner = device, weakref.ref(owner)
        if not self._hooked:
            self._hooked = True
            register_optimizer_step_pre_hook(self._begins)
            register_optimizer_step_post_hook(self._stepped)
            os.register_at_fork(before=self._stop)  # a profiler goes on in a copy of the process

    def follow(self, device: torch.device, owner: object) -> None:
        """A call without gradients has returned, of a model that is trained: what comes next is to be looked at.

        Args:
            device, owner: as of `expect`.
        """
        self.expect(device, owner)
        if self._look is None:
            self._look_on(behind_step=False)

    def ends(self) -> int:
        """A call begins: the most bytes that the process has held at once before it; 0 where that was not seen."""
        look, self._look = self._look, None
        most, self._most = self._most, 0
        if self._steps:
            self._expected, self._steps = self._steps, 0
        return most if look is None else max(most, look.ends())

    def _stop(self) -> None:
        look, self._look = self._look, None
        if look is not None:
            look.ends()

    def _begins(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._within = self._look is not None and self._behind_step
        if self._look is not None and not self._behind_step:
            self._most = max(self._most, self._look.ends())
            self._look = None
        self._stop()

    def _stepped(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._steps += 1
        if self._within or self._steps < self._expected:
            self._within = False
            return
        self._look_on(behind_step=True)

    def _look_on(self, *, behind_step: bool) -> None:
        device, owner = self._device, None if self._owner is None else self._owner()
        if device is None or owner is None or has_group():
            return
        self._behind_step, looks = behind_step, self._looks[behind_step]
        if device.type == "cuda":
            self._look = _OnCuda(device)
        # Not later: there may be evaluations of minutes, too much for a profiler.
        elif looks.get(owner, 0) < FIRST_STEPS and not unseen(device) and not is_profiled():
            looks[owner] = looks.get(owner, 0) + 1
            self._look = _OnCpu(device)


class _OnCpu:
    """A look by the allocator's events, and by when what was there before goes."""

    def __init__(self, device: torch.device) -> None:
        collect()
        blocks = list(live_blocks(device).values())
        self._live = sum(block.nbytes for block in blocks)
        there = (storage for block in blocks if (storage := block.storage()) is not None)
        self._recording = Recording(device, there, yields=True)
        self._recording.begin()

    def ends(self) -> int:
        self._recording.end()
        return self._live + self._recording.peak if self._recording.ended else 0


class _OnCuda:
    """A look by the allocator's own counts, of which a peak that is no new one is not known."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._most = device, torch.cuda.max_memory_allocated(device)

    def ends(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device)
        return peak if peak > self._most else 0


BEFORE = BeforeCalls()
