"""Where the time of a first step goes: seconds of planning and compiling, by what was done."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

_running: Clock | None = None


class Clock:
    """Wall time by phase. Phases nest: the time of an inner one is not the outer one's.

    Attributes:
        seconds: by phase, in the order in which phases first ended.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = 0.0  # time of the phases that ended within the one that runs

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let `phase` count here while the block runs."""
        global _running
        before, _running = _running, self
        try:
            yield
        finally:
            _running = before

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started, outside, self._inner = time.perf_counter(), self._inner, 0.0
        try:
            yield
        finally:
            taken = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + taken - self._inner
            self._inner = outside + taken


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the block's time under a name, where a clock runs."""
    if _running is None:
        yield
        return
    with _running._phase(name):
        yield
