"""The peak that a fraction is of: one for a model, whatever is called with later."""

from __future__ import annotations

from collections.abc import Hashable

from memopt.step.graph_peaks import GraphPeaks

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
        whole: whether a training step was seen until its backward: those before may take less.
        graphs: what eager takes in graphs, by fingerprint.
    """

    def __init__(self) -> None:
        """Nothing was planned yet."""
        self.training: int | None = None
        self.inference, self.whole = 0, False
        self.graphs: dict[str, GraphPeaks] = {}
        self._step: Hashable = None
        self._calls = 1
        self._looks = self._rests = _LOOKS
        self._seen = 0  # bytes of the first training step as it was seen in its loop, at most; 0 before
        self._added = 0  # bytes that were found beside what the latest plan has counted
        self._floor = 0  # bytes that the first training step takes at least, whatever is seen of its graphs
        self._supposed = 0  # bytes that it is supposed to take, until it is seen in its loop
        self._with_gradients = False  # whether it was supposed to begin with gradients

    @property
    def is_fixed(self) -> bool:
        """Whether no step that is seen decides any more."""
        return self.training is not None and self.whole and not self._looks

    def return_to(self, before: Reference) -> None:
        """Be as a copy that was made before: of calls that failed or were only supposed a fraction is none."""
        vars(self).update(vars(before))

    def of(self, unconstrained_bytes: int) -> int:
        """The bytes that a fraction is of, for a step or a call that takes so many itself."""
        return self.training if self.training is not None else max(self.inference, unconstrained_bytes)

    def trains(self, unconstrained_bytes: int, step: Hashable, calls: int = 1) -> None:
        """A training step takes so many bytes as it is.

        Args:
            unconstrained_bytes: without memopt, all that is resident included.
            step: tells steps apart; the first one may be counted anew while it is planned, and for no more once it was
                seen in its loop: what is counted for that is of another moment.
            calls: of the model before the first backward, so far: a step of more calls is another one than was thought.
        """
        self._added = 0
        if self.training is None or self._step is None or calls > self._calls:
            self._step, self._calls, self._looks, self._floor = step, calls, _LOOKS, 0
            self.training = max(unconstrained_bytes, self._seen, self._supposed)
        elif self._step == step:
            most = self.training if self._seen else unconstrained_bytes
            counted = min(most, max(unconstrained_bytes, self._seen))
            self.training = max(counted, self._floor, self._supposed)

    def trains_more(self) -> None:
        """More parameters are trained than before, as layers are unfrozen: the next step decides, if it takes more."""
        self._step = None

    def at_least(self, size: int) -> None:
        """The training step takes at least so many bytes, until it is known whole."""
        self._floor = max(self._floor, size)
        self.training = max(self.training or 0, size)

    def supposes(self, size: int) -> None:
        """The training step is supposed to take so many bytes, until it is seen in its loop."""
        self._supposed = max(self._supposed, size)
        self.training = max(self.training or 0, size)

    def begins_with_gradients(self, unconstrained_bytes: int, gradient_bytes: int) -> bool:
        """A step like the first one begins with gradients, which eager holds as well, and does not fit without them.

        Args:
            unconstrained_bytes: that it takes as it is.
            gradient_bytes: of the gradients that there are.

        Returns:
            Whether a fraction is of more now: once, and until the step is seen in its loop.
        """
        before = self.training
        if before is None or not self._looks or self._with_gradients or self._seen == 0:
            return False
        self._with_gradients = True
        self.supposes(min(unconstrained_bytes, before + gradient_bytes))
        return self.training != before

    def decided_by(self, graphs: Hashable) -> bool:
        """Whether a step of these graphs, by their fingerprints, is the one that has decided."""
        return isinstance(self._step, tuple) and self._step[1:] == (graphs,)

    def loops(self, step_bytes: int, calls: int = 1, graphs: Hashable = None) -> None:
        """A training step was seen in its loop.

        Where it is the one that has decided, nothing is left of what was only supposed of it.

        Args:
            step_bytes: what it takes as eager runs it, all that is resident and all that the loop holds included.
            calls: of the model before its backward: planned together later, they are no other step than was seen.
            graphs: that it ran, by their fingerprints.
        """
        if self.training is not None and self._looks:
            self._looks -= 1
            self._calls = max(self._calls, calls)
            self._seen = max(self._seen, step_bytes + self._added)
            exact = self.decided_by(graphs) or self._supposed
            self.training = max(self._floor if exact else self.training, self._seen)
            self._supposed = 0

    def has_fewer_calls(self, step_bytes: int, calls: int) -> None:
        """The first training step was planned with more calls than it turns out to have: it takes so many bytes."""
        self._calls, self._seen, self._floor, self.training = calls, step_bytes, 0, step_bytes

    def rests(self, step_bytes: int, *, of_all: bool = False) -> None:
        """A training step has held so many bytes while no graph of the model ran: eager holds the same.

        Args:
            step_bytes: that it has held.
            of_all: whether steps were seen to have that, however late: else only what the first calls show counts.
        """
        if self.training is not None and (self._rests or of_all):
            self._rests -= not of_all
            self._seen = max(self._seen, step_bytes) if self._seen else 0
            self._floor = max(self._floor, step_bytes)
            self.training = max(self.training, step_bytes)

    def takes_more(self, size: int) -> None:
        """The first training step was seen to take so many bytes more than was counted."""
        if self.training is not None:
            self.training += size
            self._added += size
            self._seen += size if self._seen else 0
            self._floor += size if self._floor else 0

    def adds(self, size: int) -> None:
        """So many bytes more are known of to be resident in all steps and calls."""
        self.takes_more(size)
        self.inference += size if self.inference else 0

    def infers(self, unconstrained_bytes: int) -> None:
        """A call of inference takes so many bytes as it is, all that is resident included."""
        self.inference = max(self.inference, unconstrained_bytes)
