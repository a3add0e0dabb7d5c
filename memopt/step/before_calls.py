"""What a loop runs between an optimizer's step and the next call of a model: a teacher, say, or the next batch.

Or between a call without gradients and what comes next: a discriminator that trains on what a generator has made.

No plan makes that less, but a budget in bytes is of all that the process holds, whoever holds it.
"""

from __future__ import annotations

import collections
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

# Calls without gradients in a row that are looked behind; of an evaluation of more of them the rest goes unseen.
_CALLS = 32


class BeforeCalls:
    """Looks at the allocator before the calls of all models of the process that have a budget."""

    def __init__(self) -> None:
        """Nothing is to be looked at."""
        self._device: torch.device | None = None
        self._owner: weakref.ref[object] | None = None
        # By owner, how often there was a look behind a step (0), or behind so many calls without gradients in a row.
        self._looks: weakref.WeakKeyDictionary[object, collections.Counter[int]] = weakref.WeakKeyDictionary()
        # By owner, behind how many such calls something else came.
        self._last: weakref.WeakKeyDictionary[object, set[int]] = weakref.WeakKeyDictionary()
        self._calls = self._others = 0  # without gradients in a row; looks that calls of other models have cut since
        self._seen: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()  # by owner, bytes at most
        self._parts: weakref.WeakKeyDictionary[object, PartsOfSteps] = weakref.WeakKeyDictionary()  # of fractions
        self._rounds = 0  # of optimizers' steps
        self._cut: int | None = None  # what a look was behind that the present call has ended
        self._steps, self._expected = 0, 1  # of optimizers since the last call, and in all before the next one
        self._within = False  # whether the present step of an optimizer has begun in a look
        self._look: _OnCpu | _OnCuda | None = None
        self._behind, self._most = 0, 0  # what the look is behind; what a look has seen that a step has ended
        self._hooked = False

    def expect(self, device: torch.device, owner: object, *, in_steps: bool = False) -> None:
        """A call with gradients has returned: what comes once its optimizers have stepped is to be looked at.

        Args:
            device: whose allocator is looked at.
            owner: of the calls; the first few looks for each are all that there are.
            in_steps: whether only what is a part of its steps counts, as for a fraction.
        """
        self._prepare(device, owner, in_steps)
        self._something_else()

    def _prepare(self, device: torch.device, owner: object, in_steps: bool) -> None:
        self._device, self._owner = device, weakref.ref(owner)
        if in_steps:
            self._parts.setdefault(owner, PartsOfSteps())
        self._seen.setdefault(owner, 0)
        if not self._hooked:
            self._hooked = True
            register_optimizer_step_pre_hook(self._begins)
            register_optimizer_step_post_hook(self._stepped)
            os.register_at_fork(before=self._stop)  # a profiler goes on in a copy of the process

    def follow(self, device: torch.device, owner: object, *, in_steps: bool = False) -> None:
        """A call without gradients has returned, of a model that is trained: what comes next is to be looked at.

        Args:
            device, owner, in_steps: as of `expect`.
        """
        self._prepare(device, owner, in_steps)
        self._calls += 1
        if self._look is None:
            self._look_on(self._calls)

    def goes_on(self) -> None:
        """A call without gradients has returned, of a model that is not trained: a look that it has ended goes on."""
        behind, self._cut = self._cut, None
        if behind is not None and self._look is None and self._others < _CALLS:
            self._others += 1
            self._look_on(behind, cut=True)

    def ends(self, owner: object = None) -> int:
        """A call begins: the most bytes that the process has held at once before it; 0 where that was not seen.

        Args:
            owner: of the call; what others' calls have ended since its last one counts as well.
        """
        look, self._look = self._look, None
        most, self._most = self._most, 0
        self._cut = None if look is None else self._behind
        if self._steps:
            self._expected, self._steps = self._steps, 0
            self._rounds += 1
        most = most if look is None else max(most, look.ends())
        for each in list(self._seen):
            self._seen[each] = max(self._seen[each], most)
        if owner in self._seen:
            most, self._seen[owner] = self._seen[owner], 0
        parts = None if owner is None else self._parts.get(owner)
        return most if parts is None else parts.took(most, self._rounds)

    def unsure(self, owner: object) -> int:
        """Bytes that the process has held before calls that may or may not have been a part of the owner's steps."""
        parts = self._parts.get(owner)
        return 0 if parts is None else parts.most

    def _stop(self) -> None:
        look, self._look = self._look, None
        if look is not None:
            look.ends()

    def _begins(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._something_else()
        self._within = self._look is not None and not self._behind
        if self._look is not None and self._behind:
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
        self._look_on(0)

    def _something_else(self) -> None:
        """Calls without gradients in a row are over."""
        owner = None if self._owner is None else self._owner()
        if self._calls and owner is not None:
            self._last.setdefault(owner, set()).add(self._calls)
        self._calls = self._others = 0

    def _look_on(self, behind: int, *, cut: bool = False) -> None:
        device, owner = self._device, None if self._owner is None else self._owner()
        if device is None or owner is None or has_group():
            return
        self._behind = behind
        if device.type == "cuda":
            self._look = _OnCuda(device)
        elif (cut or self._is_due(owner, behind)) and not unseen(device) and not is_profiled():
            self._looks.setdefault(owner, collections.Counter())[behind] += not cut
            self._look = _OnCpu(device, collects=behind <= 1 and not cut)

    def _is_due(self, owner: object, behind: int) -> bool:
        """Whether there is a look: behind each of the calls in a row once, to see which of them is the last."""
        looks = self._looks.get(owner, collections.Counter())[behind]
        # Not later: there may be evaluations of minutes, too much for a profiler.
        last = not behind or behind in self._last.get(owner, ())
        return behind <= _CALLS and looks < (FIRST_STEPS if last else 1)


class PartsOfSteps:
    """What the process holds before calls, where only what is a part of a model's own steps counts.

    An evaluation in between is none: what two steps in a row have had counts.

    Attributes:
        most: bytes at most of what was seen, whether it counts or not.
    """

    def __init__(self) -> None:
        """Nothing was seen."""
        self.most = self._now = self._before = self._counts = 0  # the latter: in the present step, and in the last one
        self._last = -2  # the last step that had any

    def took(self, most: int, step: int) -> int:
        """What counts of bytes that were seen before a call, as optimizers had stepped so often."""
        self.most, self._now = max(self.most, most), max(self._now, most)
        if not self._now or not torch.is_grad_enabled():
            return 0
        follows = step == self._last + 1
        if follows:
            self._counts = max(self._counts, min(self._before, self._now))
        self._before, self._now, self._last = self._now, 0, step
        return self._counts if follows else 0


class _OnCpu:
    """A look by the allocator's events, and by when what was there before goes."""

    def __init__(self, device: torch.device, *, collects: bool) -> None:
        if collects:
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
