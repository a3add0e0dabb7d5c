"""Two processes that work together, and what they found of some cases."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from memopt.solve import solver_worker

TOGETHER, ALONE = 400.0, 30.0  # seconds that two may take, and one whose peer has failed


def begin() -> int:
    """In a worker: its rank, once both are there; curves are searched for half a second."""
    search = solver_worker.curve
    solver_worker.curve = lambda problem, *, seconds: search(problem, seconds=min(seconds, 0.5))
    rank, path = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # as tests do: what imports keep would be looked at in each of a plan's collections, for 0.3 s
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    return rank


def tell(found: list[dict]) -> None:
    """In a worker, at its end: what it has found of its cases."""
    Path(f"{sys.argv[2]}.{sys.argv[1]}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def run_two(worker: str, folder: Path, *cases: str) -> list[list[dict]]:
    """What two processes found of each case, in order of rank.

    Args:
        worker: the script of each, which is given its rank, the path of a store, and the cases; what it has found of
            them is in `<path>.<rank>.json` then.
        folder: where the store is.
        cases: by name.
    """
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    said = [folder / f"said.{rank}" for rank in range(2)]  # a file: a pipe that nobody reads would stop a rank
    started = []
    for rank, file in enumerate(said):
        with file.open("w") as errors:
            command = [sys.executable, "-c", worker, str(rank), str(folder / "store"), *cases]
            started.append(subprocess.Popen(command, env=environment, stderr=errors))
    ends = _ends_of(started)
    lines = [f"rank {rank} {end}:\n{file.read_text()}" for rank, (end, file) in enumerate(zip(ends, said, strict=True))]
    assert [process.returncode for process in started] == [0, 0], "\n".join(lines)
    found = [json.loads((folder / f"store.{rank}.json").read_text()) for rank in range(2)]
    return [list(ranks) for ranks in zip(*found, strict=True)]


def _ends_of(started: Sequence[subprocess.Popen[bytes]]) -> list[str]:
    """How each process has ended, in words; one that does not end is killed, and soon where its peer has failed."""
    until, killed = time.monotonic() + TOGETHER, set[int]()
    while None in (codes := [process.poll() for process in started]):
        if any(codes):  # the other one may wait for it in vain
            until = min(until, time.monotonic() + ALONE)
        if time.monotonic() > until:
            killed = {process.pid for process in started if process.poll() is None}
            for process in started:
                process.kill()
                process.wait()
        time.sleep(0.05)

    def end(process: subprocess.Popen[bytes]) -> str:
        if process.pid in killed:
            return "did not end, and was killed"
        code = process.returncode
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    return [end(process) for process in started]


def found_by(worker: str, folders: pytest.TempPathFactory, quick: Sequence[str]) -> Callable[[str], list[dict]]:
    """Tells what two processes found of a case, in order of rank; the quick ones share a pair of processes."""
    known: dict[str, list[dict]] = {}

    def found(case: str) -> list[dict]:
        if case not in known:
            cases = quick if case in quick else (case,)
            known.update(zip(cases, run_two(worker, folders.mktemp("ranks"), *cases), strict=True))
        return known[case]

    return found
