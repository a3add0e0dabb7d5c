"""Steers the allocator while a step is captured, so that its blocks lie as they were packed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memopt.cuda_graphs.step import Call, Take
from memopt.memory.allocator import own_segment
from memopt.solve.placement import Placement
from memopt.solve.steering import Misplaced, Steering

log = logging.getLogger("memopt")

# The line in which arguments of forward are taken; those of its code come behind it.
_TAKEN, FIRST = 0, 1


class CudaMemory:
    """Blocks of CUDA's caching allocator, on the current stream; within a capture, of its pool."""

    def take(self, size: int) -> int:
        """Take a block of so many bytes; return its address."""
        return int(torch.cuda.caching_allocator_alloc(size))

    def give(self, address: int) -> None:
        """Give a block back."""
        torch.cuda.caching_allocator_delete(address)  # type: ignore[no-untyped-call]


class SteeredCode:
    """Both graphs of a step as code that tells its lines, and what is done before each."""

    def __init__(self) -> None:
        """Nothing is done before lines."""
        self.forward: Call | None = None
        self.backward: Call | None = None
        self.placement: Placement | None = None
        self.memory: Any = CudaMemory()
        self._act: Callable[[int], None] | None = None
        self._steering: Steering | None = None

    def set_code(self, forward: Call, backward: Call) -> None:
        """These are forward and backward graph."""
        self.forward, self.backward = forward, backward

    def before(self, line: int) -> None:
        """A line begins."""
        if self._act is not None:
            self._act(line)

    def watch_lines(self, act: Callable[[int], None] | None) -> None:
        """Do this before lines."""
        self._act = act

    def forward_by_lines(self, args: list[Any], take: Take) -> Sequence[Any]:
        """Run forward on what is taken of its arguments."""
        assert self.forward is not None
        self.before(_TAKEN)
        return self.forward(take(args))

    def steered_forward(self, args: list[Any], take: Take) -> Sequence[Any]:
        """Run it likewise, steered."""
        self.stop()
        if self.placement is None:
            return self.forward_by_lines(args, take)
        with own_segment():  # the arena; blocks of segments that grow are cut however little is left
            self._steering = Steering(self.placement, self.memory)
            self._steering.begin()
            self._act = self._lead
            return self.forward_by_lines(args, take)

    def steered_backward(self, args: list[Any]) -> Sequence[Any]:
        """Run backward, steered as forward was."""
        assert self.backward is not None
        try:
            with own_segment() if self._steering is not None else contextlib.nullcontext():
                return self.backward(args)
        finally:
            self.stop()

    def stop(self) -> None:
        """Let go of what is held."""
        steering, self._steering, self._act = self._steering, None, None
        if steering is not None:
            steering.end()

    def _lead(self, line: int) -> None:
        assert self._steering is not None
        try:
            self._steering.before(line)
        except (Misplaced, torch.OutOfMemoryError) as error:
            log.info("blocks are not steered any further: %s", error)
            self.stop()
