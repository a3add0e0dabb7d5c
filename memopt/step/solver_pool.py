"""A pool of solvers: searches in processes of their own, each with a core to itself."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from types import TracebackType

from memopt.common.cores import cores as _cores
from memopt.common.own_files import MEMOPT
from memopt.solve.recompute import Curve
from memopt.solve.solver_worker import Job, searched

log = logging.getLogger("memopt")

# A search with fewer operations ends before another process is worth its start.
_FEW = 100
# A process is given up when it takes so many times what its searches were given, as a busy machine may make it, and so
# many seconds for its start.
_PATIENCE, _START = 4.0, 5.0
# The solver imports neither torch nor the package around it, which would take longer than many a search.
_WORKER = """
import sys, types
package = types.ModuleType("memopt")
package.__path__ = [sys.argv[1]]
sys.modules["memopt"] = package
sys.path[:] = sys.argv[2:]
from memopt.solve.solver_worker import serve
serve()
"""


class Searches:
    """Searches that were begun; leaving the context ends those that still run.

    Each is done in a new Python process where there is a core for it, and here else, when its result is asked for.
    Nothing of this process is shared with them: neither threads nor a GPU.
    """

    def __init__(self) -> None:
        """Nothing is begun yet."""
        self._begun: list[Begun] = []

    def __enter__(self) -> Searches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for begun in self._begun:
            begun.stop()

    def begin(self, jobs: list[Job]) -> Begun:
        """Begin searches that are done one after the other."""
        large = sum(len(job.problem.costs) for job in jobs) >= _FEW
        self._begun.append(Begun(jobs, apart=large and self.more(1)))
        return self._begun[-1]

    def more(self, count: int) -> bool:
        """Whether there are cores for so many more; this process waits meanwhile, and needs none."""
        return 0 < count <= _cores() - sum(begun.apart for begun in self._begun) and _cores() > 1


class Begun:
    """One search, or several one after the other."""

    def __init__(self, jobs: list[Job], *, apart: bool) -> None:
        """Begin them, in a process of their own or not at all yet."""
        self._jobs, self._found = jobs, list[Curve]()
        self._until = time.monotonic() + _START + _PATIENCE * sum(job.seconds for job in jobs)
        self._process = _process() if apart else None
        self._answer = b""
        if self._process is not None:
            self._talk = threading.Thread(target=self._talked, args=(self._process,), daemon=True)
            self._talk.start()

    @property
    def apart(self) -> bool:
        """Whether a process of their own does them."""
        return self._process is not None

    def curves(self) -> list[Curve]:
        """The trade-off of each problem; a process that fails, for lack of memory say, costs time only."""
        if not self._found and self._process is not None:
            self._talk.join(max(0.0, self._until - time.monotonic()))
            try:
                self._found = pickle.loads(self._answer)
            except (EOFError, pickle.UnpicklingError):
                log.info("a process that searched gave no result")
                self.stop()
        if not self._found:
            self._found = searched(self._jobs)
        return self._found

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._talk.join()
            self._process = None

    def _talked(self, process: subprocess.Popen[bytes]) -> None:
        self._answer = process.communicate(pickle.dumps(self._jobs))[0]


def _process() -> subprocess.Popen[bytes] | None:
    """A new process that waits for searches; None where there is none to be had."""
    command = [sys.executable, "-I", "-S", "-c", _WORKER, MEMOPT, *sys.path]
    # Libraries that multiply would start a thread for every core.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
    except OSError as error:  # memory or processes are short
        log.info("no second process for a search: %s", error)
        return None
