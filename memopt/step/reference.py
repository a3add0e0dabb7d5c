"""The peak that a fraction is of: one for a model, whatever is called with later."""

from __future__ import annotations

from collections.abc import Hashable

# What a loop keeps from one step to the next is there from the second step on; there is a look as that begins, too.
_LOOKS = 3


class Reference:
    """The bytes that a model's budget is a fraction of, shared by all its sessions.

    The first training step decides, for every later shape and mode, with what its loop was seen to hold around it.
    Before there is one, a call of inference goes by the largest that was seen, so that a smaller batch is not refused
    for being small.

    Attributes:
        training: bytes of the first training step; None before.
        inference: the most bytes of a call of inference before.
    """

    def __init__(self) -> None:
        """Nothing was planned yet."""
        self.training: int | None = None
        self.inference = 0
        self._step: Hashable = None
        self._calls = 1
        self._looks = _LOOKS
        self._most = 0  # bytes of the first training step between the model's calls and backward
        self._own = self._held = 0  # bytes of the first training step: of the model, and what its loop holds beside

    def return_to(self, before: Reference) -> None:
        """Be as a copy that was made before: of a call that failed a fraction is none."""
        vars(self).update(vars(before))

    def of(self, unconstrained_bytes: int) -> int:
        """The bytes that a fraction is of, for a step or a call that takes so many itself."""
        return self.training if self.training is not None else max(self.inference, unconstrained_bytes)

    def trains(self, unconstrained_bytes: int, step: Hashable, calls: int = 1) -> None:
        """A training step takes so many bytes as it is.

        Args:
            unconstrained_bytes: without memopt, all that is resident included.
            step: tells steps apart; the first one may be counted anew while it is planned.
            calls: of the model before the first backward, so far: a step of more calls is another one than was thought.
        """
        if self._step is None or self._step == step or calls > self._calls:
            if self._step != step:
                self._held = self._most = 0
            if not self._held:  # else what was seen may be among these bytes
                self._own = unconstrained_bytes
            self._step, self._calls = step, calls
            self.training = max(unconstrained_bytes, self._own + self._held, self._most)

    def at_least(self, size: int) -> None:
        """The training step takes at least so many bytes, until it is known whole."""
        self.training = max(self.training or 0, size)

    def loops(self, held_bytes: int, most_bytes: int) -> None:
        """What its loop holds around a training step was seen.

        Args:
            held_bytes: there all the time, beside the model's step.
            most_bytes: of all that there is outside of the model's calls, the model's own included; 0 if there is none.
        """
        if self.training is not None and self._looks:
            self._looks -= 1
            self._held, self._most = max(self._held, held_bytes), max(self._most, most_bytes)
            self.training = max(self.training, self._own + self._held, self._most)

    def takes_more(self, size: int) -> None:
        """The first training step was seen to take so many bytes more than was counted."""
        if self.training is not None:
            self.training += size
            self._own += size
            self._most += size if self._most else 0

    def adds(self, size: int) -> None:
        """So many bytes more are known of to be resident in all steps and calls."""
        self.takes_more(size)
        self.inference += size if self.inference else 0

    def infers(self, unconstrained_bytes: int) -> None:
        """A call of inference takes so many bytes as it is, all that is resident included."""
        self.inference = max(self.inference, unconstrained_bytes)
