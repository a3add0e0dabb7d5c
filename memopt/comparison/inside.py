"""The inside of a process that a pool started: it says what it has, waits for its turn, and keeps a time of its own.

It speaks in lines of JSON on what was its standard output: `ready` to be timed, and `row` with what was found; `alone`
before runs that decide something by their time, and `beside` after them. After each it waits for a line on standard
input, so that only one process at a time is timed. What libraries print goes to standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import memopt
from memopt.common import phases
from memopt.comparison.job import Job

# What memopt does on the device while it plans: measured, or it takes as much as a step does.
_ON_DEVICE = ("measuring operators", "measuring the device", "trial steps")
# Runs by whose time an engine, a kernel or a way to launch them is chosen: others are stopped as when a row is timed.
_ALONE = ("timing engines", "timing kernels", "timing steps")


class Pauses:
    """Seconds that a process was stopped, in a file that it and whoever stops it have in memory."""

    def __init__(self, path: Path) -> None:
        """Use this file; it is made if need be."""
        with path.open("a+b") as file:
            file.truncate(8)
            self._map = mmap.mmap(file.fileno(), 8)

    def add(self, seconds: float) -> None:
        """Count a pause: before the process goes on."""
        struct.pack_into("d", self._map, 0, self.seconds + seconds)

    @property
    def seconds(self) -> float:
        """All pauses until now."""
        return float(struct.unpack_from("d", self._map)[0])


class Seat(phases.Watch):
    """A process's place among others: its words, its turn at the device, its time."""

    def __init__(self, job: Job, words: TextIO) -> None:
        self._job, self._words = job, words
        self._pauses = Pauses(Path(job.pauses))
        self._waited = 0.0
        self._turns = 0  # one within another

    def now(self) -> float:
        """A clock that stands still while the process is stopped, and while it waits for its turn; in seconds."""
        return time.perf_counter() - self._pauses.seconds - self._waited

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other process holds much of the device, and let others wait."""
        if not self._job.turn or self._turns:
            yield
            return
        began = self.now()
        with Path(self._job.turn).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._waited += self.now() - began
            self._turns += 1
            try:
                yield
            finally:
                self._turns -= 1
                fcntl.flock(file, fcntl.LOCK_UN)  # closing the file is not enough where a copy of this process has it

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until all other processes are stopped, and let them go on after."""
        if not self._job.turn or self._turns:
            yield
            return
        began = self.now()
        self.say("alone", device=self._job.device if self._job.device.startswith("cuda") else "")
        self._waited += self.now() - began
        self._turns += 1  # whoever lets it be alone keeps the turn for it
        try:
            yield
        finally:
            self._turns -= 1
            self.say("beside")

    def around(self, name: str) -> contextlib.AbstractContextManager[None]:
        """What is measured is measured while nobody else uses the device, and a whole step finds its memory."""
        if name in _ALONE:
            return self.alone()
        return self.turn() if name in _ON_DEVICE else contextlib.nullcontext()

    def say(self, kind: str, **content: Any) -> None:
        """Write a line, and wait for one."""
        self._words.write(json.dumps({"kind": kind, **content}) + "\n")
        self._words.flush()
        sys.stdin.readline()


def serve(path: str, work: Callable[[Job, Seat], dict[str, Any]]) -> None:
    """Do the job in the file: what the work returns is the row, an exception a row that says why there is none."""
    with os.fdopen(os.dup(1), "w") as words:
        os.dup2(2, 1)
        _end_with_parent()
        job = Job.read(Path(path))
        phases.watch = seat = Seat(job, words)
        try:
            found = work(job, seat)
        except memopt.BudgetError as error:
            found = {"reason": refusal(error), "minimum_bytes": error.minimum_bytes, "budget_bytes": error.budget_bytes}
        except Exception as error:
            traceback.print_exc()
            found = {"reason": _reason(error)}
        seat.say("row", **found)


def refusal(error: memopt.BudgetError) -> str:
    """Why a budget was refused; where its least is within it, what else was in the way."""
    least = memopt.budget.format_bytes(error.minimum_bytes)
    if error.minimum_bytes > error.budget_bytes:
        return f"refused: the minimum is {least}"
    cause = error.__cause__ or error.__context__
    why = _reason(cause) if cause is not None else "steps took more than was planned"
    return f"refused, though the least, {least}, is within the budget: {why}"


def _reason(error: BaseException) -> str:
    """The first line that says something, with the exception's kind unless it is plainly about what is missing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return text if "pip install" in text else f"{type(error).__name__}: {text}"[:400]


def _end_with_parent() -> None:
    """On Linux, let this process end when the one that started it does, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
