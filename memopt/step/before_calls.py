"""What a loop runs between an optimizer's step and the next call of a model: a teacher, say, or the next batch.

No plan makes that less, but a budget in bytes is of all that the process holds, whoever holds it.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memopt.common.garbage import collect
from memopt.memory.distributed import has_group
from memopt.memory.live_tensors import live_blocks
from memopt.memory.measure import Recording, is_profiled
from memopt.memory.window import unseen
from memopt.step.observed_steps import FIRST_STEPS


class BeforeCalls:
    """Looks at the allocator before the calls of all models of the process that have a budget in bytes."""

    def __init__(self) -> None:
        """Nothing is to be looked at."""
        self._device: torch.device | None = None
        self._owner: weakref.ref[object] | None = None
        self._looks: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()  # by owner
        self._steps, self._expected = 0, 1  # of optimizers since the last call, and in all before the next one
        self._within = False  # whether the present step of an optimizer has begun in a look
        self._look: _OnCpu | _OnCuda | None = None
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

    def ends(self) -> int:
        """A call begins: the most bytes that the process has held at once before it; 0 where that was not seen."""
        look, self._look = self._look, None
        if self._steps:
            self._expected, self._steps = self._steps, 0
        return 0 if look is None else look.ends()

    def _stop(self) -> None:
        look, self._look = self._look, None
        if look is not None:
            look.ends()

    def _begins(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._within = self._look is not None
            self._stop()

    def _stepped(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._steps += 1
        if self._within or self._steps < self._expected:
            self._within = False
            return
        device, owner = self._device, None if self._owner is None else self._owner()
        if device is None or owner is None or has_group():
            return
        if device.type == "cuda":
            self._look = _OnCuda(device)
        # Not later: there may be evaluations of minutes, too much for a profiler.
        elif self._looks.get(owner, 0) < FIRST_STEPS and not unseen(device) and not is_profiled():
            self._looks[owner] = self._looks.get(owner, 0) + 1
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
