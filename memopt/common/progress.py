"""What planning is at: in one line on a terminal, gone when planning ends; else in lines, once it takes long.

The log `memopt` has all of it as it goes on.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Protocol

import click
import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from memopt.common.scoped import scoped
from memopt.memory.distributed import has_group

log = logging.getLogger("memopt")

# Where there is no terminal, seconds before a line is written, and between two of them.
_LATE = 15.0

_current: contextvars.ContextVar[Planning | None] = contextvars.ContextVar("memopt_shown", default=None)


class Planning:
    """What is planned for one call.

    Attributes:
        what: the model's name.
        nodes: of the graphs that were captured so far.
        expected: seconds that all of it is expected to take; None where nothing is known.
    """

    def __init__(self, what: str) -> None:
        """It begins now, and nothing is shown yet."""
        self.what, self.nodes = what, 0
        self.expected: float | None = None
        self._began = time.monotonic()
        self._shown: _Shown | None = _shown_by(self)

    @property
    def seconds(self) -> float:
        """How long it takes so far."""
        return time.monotonic() - self._began

    @property
    def duration(self) -> str:
        """How long it is expected to take, in words; empty where that is not known, or was too little."""
        return f"of about {self.expected:.0f} s" if self.expected and self.expected > self.seconds else ""

    def captured(self, nodes: int, seconds_each: float | None) -> None:
        """A graph was captured that is to be planned.

        Args:
            nodes: of the graph.
            seconds_each: what each is expected to take until the step is ready; None where that is not known.
        """
        self.nodes += nodes
        if seconds_each is not None:
            self.expected = (self.seconds if self.expected is None else self.expected) + nodes * seconds_each

    def stage(self, text: str) -> None:
        """Show what it is at."""
        if self._shown is not None:
            self._shown.show(text)

    def end(self) -> None:
        """Show nothing more."""
        if self._shown is not None:
            self._shown.stop()


@contextlib.contextmanager
def planning(what: str) -> Iterator[Planning]:
    """Let `stage` show what is done for a model while the block runs; a line appears with the first stage.

    Args:
        what: the model's name.
    """
    known = _current.get()
    if known is not None:
        yield known
        return
    begun = Planning(what)
    with scoped(_current, begun):
        try:
            yield begun
        finally:
            begun.end()


def captured(nodes: int, seconds_each: float | None) -> None:
    """As `Planning.captured`, of what is planned now."""
    planned = _current.get()
    if planned is not None:
        planned.captured(nodes, seconds_each)


def stage(text: str) -> None:
    """Say what planning is at: in the log, and to who waits."""
    planned = _current.get()
    log.info("%s: %s", "a model" if planned is None else planned.what, text)
    if planned is not None:
        planned.stage(text)


class _Shown(Protocol):
    def show(self, text: str) -> None: ...

    def stop(self) -> None: ...


class _Line:
    """One line on a terminal."""

    def __init__(self, planned: Planning) -> None:
        self._planned = planned
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def show(self, text: str) -> None:
        if self._bar is None:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._bar = Progress(
                *columns,
                TextColumn("{task.fields[duration]}"),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=None, duration="")
        described = f"planning {self._planned.what}: {text}"
        self._bar.update(self._task, description=described, duration=self._planned.duration)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class _Lines:
    """A line now and then in a file, a pipe or a notebook."""

    def __init__(self, planned: Planning) -> None:
        self._planned, self._written = planned, 0.0

    def show(self, text: str) -> None:
        taken = self._planned.seconds
        if taken - self._written >= _LATE:
            self._written = taken
            lasting = f"{taken:.0f} s {self._planned.duration}".rstrip()
            print(f"memopt: planning {self._planned.what}: {text} ({lasting})", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Nothing is left to be taken away."""


def _shown_by(planned: Planning) -> _Shown | None:
    """What shows it: to this process's main thread, of the first rank, unless a command tells, or the log does."""
    if threading.current_thread() is not threading.main_thread() or click.get_current_context(silent=True) is not None:
        return None
    if has_group() and torch.distributed.get_rank() != 0:
        return None
    if sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal:
        return _Line(planned)
    return None if log.isEnabledFor(logging.INFO) else _Lines(planned)
