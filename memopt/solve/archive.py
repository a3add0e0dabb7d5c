"""Archive: the cheapest decisions ever seen at each peak, so that a lower limit never gets a faster answer."""

from __future__ import annotations

import bisect
import dataclasses

from memopt.solve.rollout import Outcome


@dataclasses.dataclass(frozen=True)
class State:
    """A decision (see Rollout) and how it plays out."""

    saved: list[bool]
    hold: list[int]
    outcome: Outcome

    @property
    def peak(self) -> int:
        """Bytes."""
        return self.outcome.peak_bytes

    @property
    def seconds(self) -> float:
        """Sum of all costs."""
        return self.outcome.seconds


class Archive:
    """The Pareto front of all states offered so far: rising peak, strictly falling seconds."""

    def __init__(self) -> None:
        self._peaks: list[int] = []
        self.states: list[State] = []

    def offer(self, state: State) -> bool:
        """Keep a state unless one with no more bytes and no more seconds is here. Return whether it was kept."""
        at = bisect.bisect_right(self._peaks, state.peak)
        if at and self.states[at - 1].seconds <= state.seconds:
            return False
        start = at - 1 if at and self._peaks[at - 1] == state.peak else at
        end = start
        while end < len(self.states) and self.states[end].seconds >= state.seconds:
            end += 1
        self._peaks[start:end] = [state.peak]
        self.states[start:end] = [state]
        return True

    def best(self, limit: int) -> State | None:
        """Return the fastest state whose peak is at most `limit` bytes."""
        at = bisect.bisect_right(self._peaks, limit)
        return self.states[at - 1] if at else None
