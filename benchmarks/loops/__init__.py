"""Training loops as users write them, by name: each yields after every step.

The models return no loss: a loop computes it, clips, accumulates, averages weights, keeps what it likes.
"""

# Each of them enters its loops.
from benchmarks.loops import (  # noqa: F401
    accumulation,
    after_backward,
    beside,
    changes,
    changing_graphs,
    contrast,
    generation,
    held_out,
    inner_calls,
    losses,
    own_state,
    pairs,
    pairs_of_models,
    pairs_with_hooks,
    policies,
    practice,
    step_ends,
    weights,
)
from benchmarks.loops.user import LOOPS, STEPS, User

__all__ = ["LOOPS", "STEPS", "User"]
