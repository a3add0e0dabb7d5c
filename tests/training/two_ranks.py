"""Two processes that work together, and what they found of some cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from memopt.solve import solver_worker


def begin() -> int:
    """In a worker: its rank, once both are there; curves are searched for half a second."""
    search = solver_worker.curve
    solver_worker.curve = lambda problem, *, seconds: search(problem, seconds=min(seconds, 0.5))
    rank, path = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
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
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", worker, str(rank), str(folder / "store"), *cases],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=400)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(errors)
    found = [json.loads((folder / f"store.{rank}.json").read_text()) for rank in range(2)]
    return [list(ranks) for ranks in zip(*found, strict=True)]


def found_by(worker: str, folders: pytest.TempPathFactory, quick: Sequence[str]) -> Callable[[str], list[dict]]:
    """Tells what two processes found of a case, in order of rank; the quick ones share a pair of processes."""
    known: dict[str, list[dict]] = {}

    def found(case: str) -> list[dict]:
        if case not in known:
            cases = quick if case in quick else (case,)
            known.update(zip(cases, run_two(worker, folders.mktemp("ranks"), *cases), strict=True))
        return known[case]

    return found
