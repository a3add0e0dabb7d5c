"""Training loops as users write them, by name: each yields after every step.

The models return no loss: a loop computes it, clips, accumulates, averages weights, keeps what it likes.
"""

from benchmarks.loops import accumulation, beside, losses, step_ends  # noqa: F401 - each of them enters its loops
from benchmarks.loops.user import LOOPS, STEPS, User

__all__ = ["LOOPS", "STEPS", "User"]
