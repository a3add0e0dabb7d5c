"""What planning is at: in one line on a terminal, gone when planning ends, and in the log `memopt` as it goes on."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import threading
from collections.abc import Iterator

import click
import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from memopt.memory.distributed import has_group

log = logging.getLogger("memopt")

_current: _Line | None = None
_what: contextvars.ContextVar[str] = contextvars.ContextVar("memopt_planning", default="")


@contextlib.contextmanager
def planning(what: str) -> Iterator[None]:
    """Let `stage` show what is done for a model while the block runs; the line appears with the first stage.

    Args:
        what: the model's name.
    """
    global _current
    token = _what.set(_what.get() or what)
    try:
        if _current is not None or not _wanted():
            yield
            return
        _current = _Line(what)
        try:
            yield
        finally:
            line, _current = _current, None
            line.stop()
    finally:
        _what.reset(token)


def stage(text: str) -> None:
    """Say what planning is at: in the log, and on a terminal."""
    log.info("%s: %s", _what.get() or "a model", text)
    if _current is not None:
        _current.show(text)


class _Line:
    def __init__(self, what: str) -> None:
        self.what = what
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def show(self, text: str) -> None:
        if self._bar is None:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._bar = Progress(
                *columns,
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        self._bar.update(self._task, description=f"planning {self.what}: {text}")

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _wanted() -> bool:
    """Whether somebody looks: a terminal, this process's main thread, the first rank, and no command that tells."""
    if not sys.stderr.isatty() or Console(stderr=True).is_dumb_terminal:
        return False
    if threading.current_thread() is not threading.main_thread() or click.get_current_context(silent=True) is not None:
        return False
    return not has_group() or torch.distributed.get_rank() == 0
