"""Gradients of shards in few large pieces of memory, so that what backward frees stays in one place.

They are made one after the other while activations are let go of. Each for itself lies where one block's activations
were, and by the end of backward no free block is as large as the gradients of the root that are sent then: the
allocator, at its limit, hands all of its cache back for them. So as many as fit go where most is free at once.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

_ALIGNED = 512  # bytes, as the allocator rounds
_LOOKS = 3  # how many of the first backwards look at what is free


class GradientPieces:
    """Which of the tensors that backward makes in the same order each time lie in one piece."""

    def __init__(self) -> None:
        """Nothing is known before a backward is over."""
        self._task: int | None = None  # of the backward that runs
        self._earlier: tuple[int, ...] = ()  # bytes of each, in the order of the latest backward that was over
        self._now: list[int] = []
        self._together: dict[int, int] = {}  # how many lie in one piece, by the number of the first
        self._backwards = 0
        self._piece: weakref.ref[torch.Tensor] | None = None
        self._offset = self._left = 0

    def begins(self, task: int) -> bool:
        """Whether the next one is the first of a backward, which is known by its number."""
        if task == self._task:
            return False
        self._task, self._now, self._piece, self._left = task, [], None, 0
        return True

    def take(
        self, nbytes: int, beside: int, largest_free: Callable[[], int], allocate: Callable[[int], torch.Tensor]
    ) -> torch.Tensor | None:
        """Memory for the next one, uint8, where it lies in a piece with others; None where it is to lie by itself.

        Args:
            nbytes: of it.
            beside: bytes that are left of the largest free block to what backward makes meanwhile.
            largest_free: tells the bytes of the largest free block.
            allocate: makes a tensor of so many bytes, and keeps it while backward runs.
        """
        number = len(self._now)
        self._now.append(nbytes)
        count = 0 if self._left else self._count(number, beside, largest_free)
        if count > 1:
            made = allocate(sum(map(_aligned, self._earlier[number : number + count])))
            self._piece, self._offset, self._left = weakref.ref(made), 0, count
        piece = self._piece() if self._left and self._piece is not None else None
        if piece is None:
            return None
        part = piece[self._offset : self._offset + nbytes]
        self._offset, self._left = self._offset + _aligned(nbytes), self._left - 1
        return part if part.nbytes == nbytes else None

    def ends(self) -> None:
        """A backward is over."""
        self._earlier, self._task = tuple(self._now), None
        self._backwards += 1

    def _count(self, number: int, beside: int, largest_free: Callable[[], int]) -> int:
        """How many from this one on lie in one piece: as many as the largest free block has room for."""
        if tuple(self._now) != self._earlier[: number + 1]:
            return 0
        coming = list(itertools.accumulate(map(_aligned, self._earlier[number:])))
        if self._backwards <= _LOOKS:
            free = largest_free() - beside if len(coming) > 1 else 0
            self._together[number] = sum(size <= free for size in coming)
        return self._together.get(number, 0) if self._together.get(number, 0) <= len(coming) else 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def largest_free_bytes(device: torch.device, stream: torch.cuda.Stream) -> int:
    """Bytes of the largest block that the allocator has free for a stream: slow, as it lists all blocks."""
    plain = (0, 0)  # the pool of no CUDA graph
    segments: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return max(
        (
            block["size"]
            for segment in segments
            if segment["device"] == device.index and segment["stream"] == stream.cuda_stream
            if tuple(segment.get("segment_pool_id", plain)) == plain
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ),
        default=0,
    )


def with_own_storage(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A part of a piece of bytes as a tensor whose storage begins with it, and which keeps the piece."""
    capsule = torch.utils.dlpack.to_dlpack(part.view(dtype))  # type: ignore[attr-defined]
    return torch.utils.dlpack.from_dlpack(capsule)
