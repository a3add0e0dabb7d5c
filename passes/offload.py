"""Consent to let saved values wait in the host's memory between forward and backward."""

from __future__ import annotations

from typing import ClassVar

from memopt.pass_manager import Pass, PassResult
from memopt.program import Program


class Offload(Pass):
    """Lets an engine copy what early layers save to pinned host memory, and back when backward comes to it.

    Algebra: a copy of a value is that value, bitwise. The program itself stays as it is: when a value leaves and comes
    back depends on how the engine's code runs, so the engine does it (`memopt.inductor.offload`), by the plan's half of
    forward and of backward, and the plan gets the room.

    1. A value that forward makes and backward reads leaves as soon as it is made; its memory is free for later layers
       once the copy is over, and it is back before backward reads it. Nothing waits for it, by the predicted times of
       the operations and the measured speed of the link.
    2. It is done for a budget that a step keeps only by recomputing something, or not at all otherwise.

    Refused: steps of several graphs, and of kernels so short that the device may wait for its host; values smaller than
    `least_bytes`, that alias what the caller has or one another, or whose copy would not end in time; more than `share`
    of the host's memory that is to be had. Engines that run operator by operator, and a CPU, do without.

    It is not among `memopt.TRAINING`: whether host memory may be pinned, and whether a link that others use as well is
    as fast as it was measured to be, is the user's to say, by `passes=(*memopt.TRAINING, Offload())`.
    """

    name: ClassVar[str] = "offload"

    def __init__(self, *, least_bytes: int = 2**24, share: float = 0.25) -> None:
        """Set the bounds.

        Args:
            least_bytes: what is smaller stays on the device.
            share: of the host's memory that is to be had, what may be pinned.
        """
        self.least_bytes, self.share = least_bytes, share

    def run(self, program: Program) -> PassResult:
        """Return the program as it is."""
        return PassResult(program)
