"""Where the time of a first step goes: seconds of planning and compiling, by what was done; of each thread its own."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Iterator

from memopt.common.scoped import scoped

_running: contextvars.ContextVar[Clock | None] = contextvars.ContextVar("memopt_clock", default=None)


class Watch:
    """What tells the time, and what surrounds phases; a process that shares a device with others may set its own."""

    def now(self) -> float:
        """The time in seconds, from any beginning."""
        return time.perf_counter()

    def around(self, name: str) -> contextlib.AbstractContextManager[None]:
        """What a phase of this name runs in; its time is not the phase's."""
        return contextlib.nullcontext()


watch = Watch()


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
        with scoped(_running, self):
            yield

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started, outside, self._inner = watch.now(), self._inner, 0.0
        try:
            yield
        finally:
            taken = watch.now() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + taken - self._inner
            self._inner = outside + taken


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the block's time under a name, where a clock runs."""
    clock = _running.get()
    with watch.around(name), contextlib.nullcontext() if clock is None else clock._phase(name):
        yield
