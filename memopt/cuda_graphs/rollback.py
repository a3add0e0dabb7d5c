"""What a CUDA graph that began early has written over, put back where it began in vain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

# Bytes of what is kept each time: more would take longer to copy than a step gains by beginning early.
_MOST = 4 * 2**20


def can_be_put_back(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these are few bytes, and may be written to here."""
    return sum(value.nbytes for value in tensors) <= _MOST and not any(value.is_inference() for value in tensors)


class Rollback:
    """Some tensors, and memory for what they held: statistics of batch norms, hundreds of small ones."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take the memory now."""
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for value in tensors:  # nobody sees what was written over: versions that autograd looks at stay as they are
            kinds.setdefault((value.device, value.dtype), []).append(value.data)
        # Kernels copy many tensors at a time, of one kind.
        self._pairs = [(values, [torch.empty_like(value) for value in values]) for values in kinds.values()]

    def keep(self) -> None:
        """Keep what the tensors hold now."""
        for values, copies in self._pairs:
            torch._foreach_copy_(copies, values)

    def put_back(self) -> None:
        """Have them hold what was kept."""
        for values, copies in self._pairs:
            torch._foreach_copy_(values, copies)
