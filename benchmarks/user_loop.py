"""A user's whole loop on classes of transformers: float32 weights, bf16 autocast, AdamW, clipping, a schedule.

Each row is a process of its own, which begins with the first byte that the device gives: what it reserved is the most
of its whole life, and the reference of budgets is what the row `compile` reserved so (--reference-bytes tells it before
that row has ended). Rows are prepared side by side (--jobs) and timed while all others are stopped. `eager:again` is
`eager` with other random numbers: how far losses of two eager runs are apart is what losses are judged by.

With --pairs each batch has a size of its own (rows and length), one of them the largest: budgets are shares of what the
row `eager` reserved, times are means over all sizes beside the row `compile_dynamic`, and a line says in how many steps
the loop waited for code.

python benchmarks/user_loop.py --model gpt2_medium --device cuda --json 'userloop_{model}.json'
python benchmarks/user_loop.py --model llama_1b_lora --tiny --rows eager,compile,memopt:0.6
python benchmarks/user_loop.py --model gpt2_medium --pairs 50 --device cuda --json 'userloop_pairs_{model}.json'
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import memopt
from memopt.comparison.job import Job, Source
from memopt.comparison.pool import ALLOCATOR, Pool
from memopt.comparison.processes import driver_version

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.pooled import fill  # noqa: E402 - found once the root is on the path
from benchmarks.user_models import SIZES, TINY  # noqa: E402

ROWS = "compile,memopt:0.6,memopt:0.4,memopt:0.3,eager,eager:again,checkpoint,checkpoint_compile,compile:0.3"
PAIRS = "eager,compile_dynamic,memopt:0.5,memopt_dynamic:0.5"


class Loop:
    """One model's rows, and its file."""

    def __init__(self, given: argparse.Namespace, model: str, reference: int | None) -> None:
        self.given, self.model, self.reference = given, model, reference
        self.sizes = dict(TINY if given.tiny else SIZES[model])
        self.rows: dict[str, dict[str, Any]] = {}
        self.reference_row, self.peer = ("eager", "compile_dynamic") if given.pairs else ("compile", "compile")

    def jobs(self) -> dict[str, Job]:
        """Those that can begin: a budget is known once its reference is. By row."""
        wanted = self.given.rows.split(",")
        return {row: self._job(row) for row in wanted if self.reference is not None or share_of(row) is None}

    def _job(self, row: str) -> Job:
        given, share = self.given, share_of(row)
        budget = None if share is None or self.reference is None else int(share * self.reference)
        return Job(
            Source("user_loop_row:made", {"name": self.model, "tiny": given.tiny}),
            row,
            training=True,
            device=given.device,
            repeats=given.repeats,
            path=(str(HERE), *(str(Path(entry).resolve()) for entry in sys.path)),
            program=(str(HERE / "user_loop_row.py"),),
            more={
                "budget_bytes": budget,
                "sizes": self.sizes,
                "losses": given.losses,
                "pairs": given.pairs,
                "niceness": 0,
            },
        )

    def take(self, row: str, said: dict[str, Any]) -> None:
        """Note what a row's process said in the end, and write the file."""
        found = {"row": row, **{key: value for key, value in said.items() if key not in ("kind", "seconds")}}
        if "seconds" in said:
            # Steps of one size lie around their median; those of many differ, and all of them are the loop's time.
            middle = statistics.fmean if self.given.pairs else statistics.median
            found["seconds"] = middle(said["seconds"])
            found["waits"] = sum(each > max(1.0, 10 * found["seconds"]) for each in said.get("loss_seconds", ()))
        if row == self.reference_row and self.reference is None and "reserved_bytes" in said:
            self.reference = said["reserved_bytes"]
        share = share_of(row)
        if share is not None and self.reference is not None:
            found["budget_bytes"] = int(share * self.reference)
        self.rows[row] = found
        if self.given.json:
            Path(self.given.json.replace("{model}", self.model)).write_text(
                json.dumps(self.described(), indent=1) + "\n"
            )

    def described(self) -> dict[str, Any]:
        """The file: machine, versions, settings and rows."""
        given, cuda = self.given, self.given.device.startswith("cuda")
        import transformers

        return {
            "machine": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
            **({"driver": driver_version()} if cuda else {}),
            "cores": len(os.sched_getaffinity(0)),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "memopt": memopt.__version__,
            "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR) if cuda else "",
            "model": self.model,
            "reference_bytes": self.reference,
            "settings": {**self.sizes, "repeats": given.repeats, "losses": given.losses, "jobs": given.jobs}
            | ({"pairs": given.pairs} if given.pairs else {}),
            "rows": list(self.rows.values()),
        }

    def line(self, row: str) -> str:
        """A row as text: MB, milliseconds, the multiple of torch.compile's, and how far losses are from eager's."""
        found, whole = self.rows[row], self.rows.get(self.peer, {})
        cells = [found.get(key) for key in ("budget_bytes", "predicted_bytes", "allocated_bytes", "reserved_bytes")]
        text = " ".join(f"{'-' if cell is None else f'{cell / 1e6:,.0f}':>10}" for cell in cells)
        if "seconds" not in found:
            return f"{self.model:14} {row:18} {text} {found.get('reason', '')[:200]}"
        ratio = f"{found['seconds'] / whole['seconds']:.3f}" if "seconds" in whole else "-"
        apart = self.apart(row)
        first = found["first_step_seconds"]
        waits = f" waited for code in {found['waits']} steps" if self.given.pairs else ""
        over = "OVER" if found.get("reserved_bytes", 0) > (found.get("budget_bytes") or math.inf) else ""
        return (
            f"{self.model:14} {row:18} {text} {found['seconds'] * 1e3:9.1f} {ratio:>7} {first:8.1f} "
            f"{'-' if apart is None else f'{apart:.1e}':>8}{waits} {over}"
        )

    def apart(self, row: str) -> float | None:
        """The most by which this row's losses differ from eager's; None where a row is missing."""
        own, eager = self.rows[row].get("losses"), self.rows.get("eager", {}).get("losses")
        return max(abs(a - b) for a, b in zip(own, eager, strict=True)) if own and eager else None


def share_of(row: str) -> float | None:
    """A row's budget, as a share of the reference; None for those that have no such budget."""
    kind, _, share = row.partition(":")
    return float(share) if kind.startswith("memopt") and share else None


def main() -> int:
    """Run the loops that are asked for; 1 where a row reserved more than its budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2_medium", help=f"one or several of {', '.join(SIZES)}")
    parser.add_argument("--rows", help=f"{ROWS}; with --pairs {PAIRS}")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--losses", type=int, default=20, help="steps whose losses are compared")
    parser.add_argument("--pairs", type=int, default=0, help="batches of as many sizes, each twice")
    parser.add_argument("--jobs", type=int, default=1, help="rows prepared at a time")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds in which a row is prepared")
    parser.add_argument("--seconds", type=float, help="for everything together")
    parser.add_argument("--reference-bytes", default="", help="model=N,…: what torch.compile is known to reserve")
    parser.add_argument("--json", help="a file; with several models, one for each {model}")
    given = parser.parse_args()
    given.rows = given.rows or (PAIRS if given.pairs else ROWS)
    if given.pairs:
        given.losses = given.repeats = given.pairs
    models = given.model.split(",")
    if unknown := [name for name in models if name not in SIZES]:
        parser.error(f"unknown model {unknown[0]}")
    if given.json and len(models) > 1 and "{model}" not in given.json:
        parser.error("--json needs {model} in it where there are several")
    known = dict(item.split("=") for item in given.reference_bytes.split(",") if item)
    loops = [Loop(given, model, int(float(known[model])) if model in known else None) for model in models]
    heads = " ".join(f"{name:>10}" for name in ("budget MB", "predicted", "allocated", "reserved"))
    print(f"{'':6} {'':14} {'':18} {heads} {'ms':>9} {'ratio':>7} {'first s':>8} {'losses':>8}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(Path(folder), given.timeout, False, given.jobs, given.seconds)
        fill(loops, pool, Loop.line)
    print()
    for loop in loops:
        for row in loop.rows:
            print(loop.line(row))
    return int(any(loop.line(row).endswith("OVER") for loop in loops for row in loop.rows))


if __name__ == "__main__":
    sys.exit(main())
