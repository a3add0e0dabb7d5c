"""One loop in a process of its own, and its row beside the library alone."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

CLOSE = {False: 1e-4, True: 2e-2}  # relative, of a loss; by autocast
ROOT = Path(__file__).resolve().parents[2]
ROW_HEAD = (
    "| loop | precision | peak alone, MB | budget, MB | largest peak / budget | losses | largest difference |",
    "|---|---|---|---|---|---|---|",
)


@dataclasses.dataclass
class Row:
    """One loop within one budget."""

    name: str
    bf16: bool
    alone: int
    budget: int
    peaks: list[int]
    losses: int
    apart: float
    failed: str = ""

    @property
    def good(self) -> bool:
        """Whether the budget was kept, and the losses are the library's alone."""
        return not self.failed and max(self.peaks) <= self.budget and self.apart <= CLOSE[self.bf16]

    def line(self) -> str:
        """As a row of the table."""
        precision = "bf16" if self.bf16 else "float32"
        start = f"| {self.name} | {precision} | {self.alone / 1e6:.2f} | {self.budget / 1e6:.2f} | "
        if self.failed:
            return f"{start}{self.failed} | | |"
        over = "" if self.good else " **NO**"
        return f"{start}{max(self.peaks) / self.budget:.3f}{over} | {self.losses} | {self.apart:.1e} |"


def run(name: str, budget: int | None, bf16: bool, engine: str) -> dict[str, Any]:
    """What a loop found, in a process of its own."""
    given = json.dumps({"name": name, "budget": budget, "bf16": bf16, "engine": engine})
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(ROOT), *sys.path]
    settings = {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.integrations.run", given]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings}, cwd=ROOT)
    if ended.returncode:
        return {"failed": ended.stderr.strip().splitlines()[-1], "why": ended.stderr}
    found: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


def row_of(name: str, bf16: bool, shares: Sequence[float], engine: str) -> Iterator[Row]:
    """The rows of one loop: alone once, then within each share of its own peak."""
    alone = run(name, None, bf16, engine)
    if "failed" in alone:
        raise RuntimeError(f"{name} alone: {alone['why']}")
    peak = max(alone["peaks"])
    for share in shares:
        budget = int(share * peak)
        found = run(name, budget, bf16, engine)
        if "failed" in found:
            yield Row(name, bf16, peak, budget, [], 0, 0.0, found["failed"])
            continue
        pairs = list(zip(found["losses"], alone["losses"], strict=True))
        apart = max(abs(one - other) / abs(other) for one, other in pairs)
        yield Row(name, bf16, peak, budget, found["peaks"], len(pairs), apart)


def _main() -> None:
    import torch

    from benchmarks.integrations.loops import LOOPS, Asked, Found

    given, found = json.loads(sys.argv[1]), Found()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        LOOPS[given["name"]](Asked(given["budget"], given["bf16"], given["engine"], Path(folder)), found)
    print(json.dumps(dataclasses.asdict(found)))


if __name__ == "__main__":
    _main()
