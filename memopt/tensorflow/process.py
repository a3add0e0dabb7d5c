"""Calling a task of `memopt.tensorflow.tasks` in a fresh process: crashes, log lines and settings stay there."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_WORKER = Path(__file__).resolve().parent / "worker.py"
_EXTRA = "pip install memopt[tensorflow]"


class TensorFlowError(RuntimeError):
    """TensorFlow or Keras could not do what was asked; the message is one line."""


class UnsafeModelError(TensorFlowError):
    """The model asks for code to run when it is read: it is refused."""


class InputsError(TensorFlowError):
    """The inputs that were given, or that are missing, do not fit the model."""


_KINDS = {"unsafe": UnsafeModelError, "inputs": InputsError}


def require(*libraries: str, purpose: str) -> None:
    """Make sure that libraries of the extra are there, without importing them.

    Raises:
        TensorFlowError: one is missing; the message names it and the extra.
    """
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            raise TensorFlowError(f"{purpose} needs {library}: {_EXTRA}")


def call(
    task: str, request: Mapping[str, Any], folder: Path, *, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a task and return its answer.

    Args:
        task: the name of a file in `memopt.tensorflow.tasks`.
        request: what the task's `run` is given, as JSON allows.
        folder: an existing folder for files that go to and fro.
        environment: variables that the process has besides ours.

    Raises:
        TensorFlowError: the task failed, or its process died; a subclass where the task says of which kind.
    """
    (folder / "request.json").write_text(json.dumps(dict(request)))
    (folder / "reply.json").unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, str(_WORKER), task, str(folder)],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **_paths(), "TF_CPP_MIN_LOG_LEVEL": "3", **(environment or {})},
    )
    log.debug("task %s wrote: %s%s", task, done.stdout, done.stderr)
    try:
        reply = json.loads((folder / "reply.json").read_text())
    except FileNotFoundError:
        raise TensorFlowError(_death(task, done.returncode, done.stderr)) from None
    if "error" in reply:
        log.debug("task %s failed: %s", task, reply["traceback"])
        raise _KINDS.get(reply["kind"], TensorFlowError)(_first_line(reply["error"]))
    answer: dict[str, Any] = reply["answer"]
    return answer


def _paths() -> dict[str, str]:
    """The process finds what this one finds, and nothing in the working folder besides."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONSAFEPATH": "1"}


def _death(task: str, code: int, words: str) -> str:
    if code < 0:
        number = -code
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        return f"the process of {task} was ended by {name}" + (" (out of memory?)" if number == signal.SIGKILL else "")
    return f"the process of {task} ended with code {code}: {_last_line(words.splitlines())}"


def _last_line(lines: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "no word")


def _first_line(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "unknown")
