"""Worker processes: started, talked to, and never waited for without end; one that dies says how."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from memopt.comparison.inside import Pauses
from memopt.comparison.job import Job


class WorkerFailed(RuntimeError):
    """A process ended, or ran out of time, before it said what it was asked for; the message says why."""


class Worker:
    """One process. Its lines arrive in a queue; its errors are in a file."""

    def __init__(self, job: Job, folder: Path, name: str, seconds: float, environment: Mapping[str, str]) -> None:
        """Start it; each thing that it is asked for may take so many seconds."""
        path, self._errors, pauses = (folder / f"{name}.{kind}" for kind in ("json", "err", "pauses"))
        self._pauses, self._stopped = Pauses(pauses), 0.0  # and when it was stopped last
        dataclasses.replace(job, pauses=str(pauses)).write(path)
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        path_of_modules = os.pathsep.join((*job.path, os.environ.get("PYTHONPATH", ""))).strip(os.pathsep)
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *job.program, str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": path_of_modules, **environment},
                start_new_session=True,  # so that what it starts can be ended with it
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def expect(self) -> dict[str, Any]:
        """The next thing that the process says.

        Raises:
            WorkerFailed: it ended, or its time is over.
        """
        said = self._next(max(0.0, self._deadline - time.monotonic()))
        if said is None:
            raise self._too_late()
        return said

    def heard(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """What the process has said, or says within so many seconds; None while it has said nothing.

        Raises:
            WorkerFailed: it ended, or its time is over.
        """
        said = self._next(seconds)
        if said is None and time.monotonic() > self._deadline:
            raise self._too_late()
        return said

    def _next(self, seconds: float) -> dict[str, Any] | None:
        try:
            line = self._lines.get(timeout=seconds) if seconds else self._lines.get_nowait()
        except queue.Empty:
            return None
        if line is None:
            raise WorkerFailed(self._death())
        return dict(json.loads(line))

    def _too_late(self) -> WorkerFailed:
        self.end()
        return WorkerFailed(f"no result within {self._seconds:g} s")

    def stop(self) -> None:
        """Stop it and what it started; that time is not its own."""
        self._signal(signal.SIGSTOP)
        self._stopped = time.monotonic()

    def go_on(self) -> None:
        """Let it go on after `stop`."""
        paused = time.monotonic() - self._stopped
        self._pauses.add(paused)
        self._deadline += paused
        self._signal(signal.SIGCONT)

    def go(self, seconds: float | None = None) -> None:
        """Let the process go on; it has so many seconds from now on, for it may have waited, or what it had before."""
        assert self._process.stdin is not None
        if seconds is not None:
            self._seconds, self._deadline = seconds, time.monotonic() + seconds
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """End the process and what it started, if it has not ended yet."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _death(self) -> str:
        code = self._process.wait()
        if code >= 0:
            how = f"exit code {code}"
        else:
            try:
                how = f"killed by {signal.Signals(-code).name}"
            except ValueError:
                how = f"killed by signal {-code}"
        lines = [line.strip() for line in self._errors.read_text(errors="replace").splitlines() if line.strip()]
        said = [line for line in lines if "rror" in line] or lines
        return f"{how}: {said[-1][:300]}" if said else how


def device_used(device: str, after: float = 0.0) -> int | None:
    """Bytes of a CUDA device that are in use, by all processes together, after so many seconds; None for no device."""
    if not device:
        return None
    time.sleep(after)
    free, total = torch.cuda.mem_get_info(torch.device(device))
    return int(total - free)


def driver_version() -> str | None:
    """The version of NVIDIA's driver; None where its tool is missing."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
