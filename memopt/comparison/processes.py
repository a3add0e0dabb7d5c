"""Worker processes: started, talked to, and never waited for without end; one that dies says how."""

from __future__ import annotations

import contextlib
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

from memopt.comparison.job import Job


class WorkerFailed(RuntimeError):
    """A process ended, or ran out of time, before it said what it was asked for; the message says why."""


class Worker:
    """One process. Its lines arrive in a queue; its errors are in a file."""

    def __init__(self, job: Job, folder: Path, name: str, seconds: float, environment: Mapping[str, str]) -> None:
        """Start it; each thing that it is asked for may take so many seconds."""
        path, self._errors = folder / f"{name}.json", folder / f"{name}.err"
        job.write(path)
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "memopt.comparison.worker", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
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
        try:
            line = self._lines.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            self.end()
            raise WorkerFailed(f"no result within {self._seconds:g} s") from None
        if line is None:
            raise WorkerFailed(self._death())
        return dict(json.loads(line))

    def go(self) -> None:
        """Let the process go on; its time begins anew, for it may have waited for others."""
        assert self._process.stdin is not None
        self._deadline = time.monotonic() + self._seconds
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """End the process and what it started, if it has not ended yet."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()

    def wait(self) -> None:
        """Let it end by itself, in its time; then it is ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=max(0.0, min(30.0, self._deadline - time.monotonic())))
        self.end()

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


def device_used(identity: str) -> int | None:
    """Bytes of a CUDA device that are in use, by all processes together; None where the driver's tool is missing."""
    if not identity:
        return None
    query = ["nvidia-smi", f"--id={identity}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        return int(found.split()[0]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def driver_version() -> str | None:
    """The version of NVIDIA's driver; None where its tool is missing."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
