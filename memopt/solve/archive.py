"""Archive: the cheapest schedules ever seen at each peak, so that a lower limit never gets a faster answer."""

from __future__ import annotations

import bisect

from memopt.solve.rollout import Outcome


class Archive:
    """The Pareto front of all outcomes offered so far: rising peak, strictly falling seconds."""

    def __init__(self) -> None:
        self._peaks: list[int] = []
        self._entries: list[tuple[int, float, list[int]]] = []

    def offer(self, outcome: Outcome) -> bool:
        """Keep an outcome unless one with no more bytes and no more seconds is here. Return whether it was kept."""
        peak, seconds = outcome.peak_bytes, outcome.seconds
        at = bisect.bisect_right(self._peaks, peak)
        if at and self._entries[at - 1][1] <= seconds:
            return False
        start = at - 1 if at and self._peaks[at - 1] == peak else at
        end = start
        while end < len(self._entries) and self._entries[end][1] >= seconds:
            end += 1
        self._peaks[start:end] = [peak]
        self._entries[start:end] = [(peak, seconds, outcome.steps)]
        return True

    @property
    def entries(self) -> list[tuple[int, float, list[int]]]:
        """Peak bytes, seconds and steps of each schedule kept, by rising peak."""
        return list(self._entries)

    def seconds_at(self, limit: int) -> float:
        """Return the seconds of the fastest schedule within `limit` bytes; infinity when there is none."""
        at = bisect.bisect_right(self._peaks, limit)
        return self._entries[at - 1][1] if at else float("inf")
