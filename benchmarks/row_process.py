"""A process that prepares one row of a table, waits for its turn, is timed, and is looked at while it holds memory."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any


class RowProcess:
    """Speaks in lines: READY … when it is prepared, then, once told to go on, ROW and its figures as JSON.

    Attributes:
        cache: the folder of its compile caches, its own unless it is given one.
    """

    def __init__(
        self,
        model: str,
        row: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        cache: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        self.model, self.row = model, row
        self.cache = cache or tempfile.TemporaryDirectory()
        caches = {"TORCHINDUCTOR_CACHE_DIR": self.cache.name, "TRITON_CACHE_DIR": f"{self.cache.name}/triton"}
        self.errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read once the process has ended
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env={**os.environ, **caches, **environment}, start_new_session=True,
        )  # fmt: skip
        self.lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def wait_for(self, word: str, seconds: float | None = None) -> str | None:
        """The rest of the line that begins with `word`; empty when the process ended first, None when time did."""
        while True:
            try:
                line = self.lines.get(timeout=seconds)
            except queue.Empty:
                return None
            if not line:
                self.lines.put("")  # for whoever asks next
                return ""
            if line.startswith(word):
                return line[len(word) :].strip() or word

    def say(self) -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        """End it now, with the processes that it started."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Let it and the processes that it started do nothing until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `stop`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def finish(self, cuda: bool) -> dict[str, Any]:
        """Time the row, let the process end, and see what the device gets back; a row that failed says why."""
        self.say()
        found = self.wait_for("ROW ")
        before = used_bytes(cuda)
        self.say()
        self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it started may outlive it, and hold its output open
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        time.sleep(0.2)
        after = used_bytes(cuda)
        self.cache.cleanup()
        if found:
            self.errors.close()
            return {**json.loads(found), "process_bytes": before - after}
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        self.errors.close()
        last = [line for line in lines if "Error" in line][-1:] or lines[-1:]
        return {"model": self.model, "row": self.row, "error_text": (last or ["it ended without a word"])[0][:300]}


def run_alone(
    row: str, command: Sequence[str], caches: Path, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run one row in a process of its own to its end; one that failed says why by `error`.

    Args:
        row: its name.
        command: prints ROW and its figures as JSON.
        caches: the folder of its compile caches.
        environment: what is set for it where the caller's own environment does not.
    """
    folders = {"MEMOPT_CACHE_DIR": "memopt", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    own = {name: str(caches / folder) for name, folder in folders.items()}
    settings = {**(environment or {}), **os.environ, **own}
    done = subprocess.run(command, env=settings, text=True, capture_output=True, check=False)
    found = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if not found:
        last = [line.strip() for line in done.stderr.splitlines() if "Error" in line][-1:]
        return {"row": row, "error": (last or [f"exit code {done.returncode}"])[0][:300]}
    return dict(json.loads(found[0]))


def used_bytes(cuda: bool) -> int:
    """Bytes of the current CUDA device that are in use, by all processes together; 0 without one."""
    from memopt.comparison.processes import device_used

    return device_used("cuda" if cuda else "") or 0
