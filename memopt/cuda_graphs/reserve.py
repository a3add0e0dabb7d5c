"""What to leave of a budget for a CUDA graph, before there is code: a plan that leaves nothing would be made twice."""

from __future__ import annotations

from collections.abc import Iterable

from memopt.memory.cost.table import OperatorCost

# What generated code's host was seen to need for each kernel, from Python, in seconds; and the share of a step's time
# from which on its device may wait: there are some more kernels than operators, and those are timed with cold caches.
_LAUNCH, _MAY_WAIT = 25e-6, 0.5
# Between a CUDA graph's blocks limit / _SHARE is lost: ResNet-152's lost up to 4 %, then 1 %. Segments of small blocks
# take _SEGMENTS bytes, and limit / _MOST at most.
_SHARE, _SEGMENTS, _MOST = 64, 32 * 2**20, 16


def reserved_bytes(costs: Iterable[OperatorCost], limit: int, inputs: int) -> int:
    """Bytes of a limit that a captured step takes beside its tensors, where it may be worth it; else 0.

    Args:
        costs: of the step's kernels; those that are fused into others take no time.
        limit: the budget in bytes.
        inputs: bytes of the caller's, which are copied to where a CUDA graph reads them.
    """
    return inputs + limit // _SHARE + min(_SEGMENTS, limit // _MOST) if may_wait(costs) else 0


class CaptureReserve:
    """What is left of the budget of one model's steps for capturing them, or for what they need in one piece.

    Attributes:
        bytes: that are left now.
        wanted: whether any are to be: not where the budget is short.
        beside: bytes that the captured step leaves of the budget; None where it is not captured.
    """

    def __init__(self) -> None:
        """Nothing is left yet, and may be."""
        self.bytes, self.wanted = 0, True
        self.beside: int | None = None

    def leave(self, costs: Iterable[OperatorCost], limit: int, inputs: int) -> None:
        """As `reserved_bytes`, where that is wanted."""
        self.bytes = reserved_bytes(costs, limit, inputs) if self.wanted else 0

    def leave_in_one(self, size: int) -> None:
        """So many bytes, where anything is wanted: a free block as large is not there when they are needed."""
        self.bytes = size if self.wanted else 0

    def restore(self, size: int = 0) -> None:
        """Leave as many bytes as another plan did, or none."""
        self.bytes = size

    def want(self, wanted: bool = True) -> None:
        """Leave something from the next plan on, or nothing."""
        self.wanted = wanted

    def uses_cuda_graphs(self, beside: int | None) -> None:
        """The step is captured and leaves so many bytes of the budget; None: it is not."""
        self.beside = beside

    def lacks(self, size: int) -> int:
        """What is missing for so many bytes where no graph runs: a CUDA graph's memory is its own all the time."""
        return 0 if self.beside is None else max(0, size - self.beside)

    def give_up(self) -> bool:
        """Leave nothing from now on; whether something was left."""
        left = self.bytes > 0
        if left:
            self.bytes, self.wanted = 0, False
        return left


def may_wait(costs: Iterable[OperatorCost]) -> bool:
    """Whether the device may wait for its host in a step of such kernels; what is fused into others takes no time."""
    seconds = [cost.seconds for cost in costs if cost.seconds]
    return _LAUNCH * len(seconds) >= _MAY_WAIT * sum(seconds)
