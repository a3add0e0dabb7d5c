"""Which steps of a loop are observed: the first ones, and then ever fewer, as looking takes time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

# A loop may make what it keeps from its second or third step on: an average of weights, an optimizer's state.
FIRST_STEPS = 4
# Once they are over, looking takes at most this share of the loop's time since the last look: finding all tensors of a
# process takes half a second, which is forty steps of a small model.
_SHARE = 1 / 20


def is_observed(step: int) -> bool:
    """Whether the step of this number, counted from 1, may be observed: the first ones, the 8th, the 16th and so on."""
    return step <= FIRST_STEPS or step & (step - 1) == 0


class Looking:
    """Says which steps of one loop are observed, by what looking took so far.

    Where that takes no time, as with a GPU's own counts, those are all that may be.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Nothing was looked at; the clock gives seconds."""
        self._clock = clock
        self._spent, self._ended = 0.0, clock()  # seconds that the last look took, and when it ended

    def is_due(self, step: int) -> bool:
        """Whether the step of this number, counted from 1, is observed; if it is, a new look begins."""
        if not is_observed(step) or (step > FIRST_STEPS and not self._is_small()):
            return False
        self._spent = 0.0
        return True

    @contextlib.contextmanager
    def looks(self) -> Iterator[None]:
        """Within, a part of the look is taken; how long it takes is noted."""
        began = self._clock()
        try:
            yield
        finally:
            self._ended = self._clock()
            self._spent += self._ended - began

    def _is_small(self) -> bool:
        return self._spent <= _SHARE * (self._clock() - self._ended)
