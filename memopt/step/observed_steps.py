"""Which steps of a loop are observed: the first ones, and then ever fewer, as looking takes time."""

from __future__ import annotations

# A loop may make what it keeps from its second or third step on: an average of weights, an optimizer's state.
FIRST_STEPS = 4


def is_observed(step: int) -> bool:
    """Whether the step of this number, counted from 1, is observed: the first ones, the 8th, the 16th and so on."""
    return step <= FIRST_STEPS or step & (step - 1) == 0
