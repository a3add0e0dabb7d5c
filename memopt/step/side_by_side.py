"""Work on plain numbers done side by side, in copies of this process: each search has a core of its own."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar

import torch

T = TypeVar("T")

log = logging.getLogger("memopt")


def side_by_side(tasks: Sequence[Callable[[], T]], *, seconds: float) -> list[T]:
    """Call the tasks and return their results in order, at the same time where there are cores for it.

    The first runs here, each other one in a copy of this process (`os.fork`, as torch's data loaders work). So a task
    is plain Python on plain numbers: it never touches a GPU, waits for no other thread, and its result can be pickled.
    A copy that fails, for lack of memory say, costs time only: its task is done here.

    Args:
        tasks: what to call.
        seconds: a copy that has not answered so long after the first task ended is given up.

    Raises:
        Exception: whatever a task raises.
    """
    if len(tasks) < 2 or not _may_fork():
        return [task() for task in tasks]
    with contextlib.ExitStack() as stack:
        copies = []
        for task in tasks[1:]:
            copies.append(_Copy(task))
            stack.callback(copies[-1].stop)
        return [tasks[0](), *(copy.result(seconds) for copy in copies)]


def _may_fork() -> bool:
    """Whether a copy is of use, and safe: more than one core, on Linux, from the main thread, without JAX or a GPU.

    JAX has threads of its own from the start, and warns of every fork that it is likely to end in a deadlock. Beside
    CUDA's threads it was not tried.
    """
    if "jax" in sys.modules or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    if not hasattr(os, "fork") or not hasattr(os, "sched_getaffinity"):
        return False
    return len(os.sched_getaffinity(0)) > 1 and threading.current_thread() is threading.main_thread()


class _Copy:
    """A task in a copy of this process."""

    def __init__(self, task: Callable[[], Any]) -> None:
        self._task = task
        self._pid: int | None = None
        self._receiver, sender = multiprocessing.Pipe(duplex=False)
        try:
            with warnings.catch_warnings():
                # Python warns of threads: the copy waits for none, and is given up where it does not answer.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pid = os.fork()
        except OSError as error:  # memory or processes are short
            log.info("no second process for a search: %s", error)
        if self._pid == 0:
            _work(task, sender)
        sender.close()

    def result(self, seconds: float) -> Any:
        """What the task returned; it is done here where the copy does not say."""
        try:
            if self._pid is not None and self._receiver.poll(seconds):
                return pickle.loads(self._receiver.recv_bytes())
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            log.info("a process that searched ended without a result: %s", error)
        return self._task()

    def stop(self) -> None:
        """End the copy."""
        self._receiver.close()
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # somebody else waits for all children
                os.waitpid(self._pid, 0)


def _work(task: Callable[[], Any], sender: Connection) -> NoReturn:
    """Do the task in the copy, and end there: nothing that this process would do at its end is done twice."""
    status = 1
    try:
        gc.disable()  # garbage may hold what lies on a GPU
        sender.send_bytes(pickle.dumps(task()))
        status = 0
    finally:
        os._exit(status)
