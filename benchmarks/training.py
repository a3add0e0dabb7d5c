"""Training steps beside the peers: eager, checkpointed blocks, torch.compile, its memory budget, and memopt's budgets.

Every row runs in a process of its own. Rows are prepared side by side (--jobs) in the order given, one model after the
other, and each is timed as soon as it is ready, while all others are stopped; then it is printed and written. After
--seconds what is ready is still timed, and what is not is a row that says so. On CUDA a profile of one more step says
how long some kernel ran: what lies between that and the step is the host's time.

Budgets are shares of what torch.compile reserves (on CPU, allocates): memopt's rows begin when the row `compile` has
ended, or at once where --reference-bytes tells. `least` is the least that memopt says it can do, plus 2 %: it
is ready last, so rows that are prepared beside it give way to it (nice).

python benchmarks/training.py --model gpt2_medium --device cuda --dtype bfloat16 --json out.json
python benchmarks/training.py --model unet --tiny --rows eager,compile,memopt:0.8
python benchmarks/training.py --model gpt2_medium,llama_1b --jobs 8 --seconds 500 --json 'training_{model}.json'
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import memopt
from memopt.comparison.job import Job, Source
from memopt.comparison.pool import ALLOCATOR, Pool
from memopt.comparison.processes import driver_version

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from benchmarks import kernels  # noqa: E402 - found once the root is on the path
from benchmarks.pooled import fill  # noqa: E402

SIZES: dict[str, dict[str, int]] = {
    "gpt2_medium": {"batch": 16, "sequence": 1024},
    "llama_1b": {"batch": 4, "sequence": 2048},
    "unet": {"batch": 8, "resolution": 512},
    "bert_large": {"batch": 32, "sequence": 512},
    "resnet152": {"batch": 128, "resolution": 224},
    "densenet161": {"batch": 96, "resolution": 224},
}
ROWS = (
    "compile,memopt:0.5,memopt:0.8,memopt:0.3,memopt:1.0,memopt:least,eager,checkpoint,compile:0.5,compile:0.1,"
    "memopt:0.6,memopt:0.4,compile:0.7,compile:0.3"
)

# How far rows that are prepared side by side give way to `memopt:least`.
_NICE = 10


class Table:
    """One model's rows, and its file."""

    def __init__(self, given: argparse.Namespace, model: str, reference: int | None) -> None:
        self.given, self.model, self.reference = given, model, reference
        self.wanted = [row for name, row in given.only if name == model] or given.rows
        self.inputs = {"batch": 4} if given.tiny else dict(SIZES[model])
        if given.batch:
            self.inputs["batch"] = given.batch
        self.rows: dict[str, dict[str, Any]] = {}

    def jobs(self) -> dict[str, Job]:
        """Those that can begin: a budget is known once its reference is. By row."""
        return {row: self._job(row) for row in self.wanted if self.reference is not None or not share_of(row)}

    def _job(self, row: str) -> Job:
        given, share = self.given, share_of(row)
        budget = None if share is None or self.reference is None else int(share * self.reference)
        changes = {"tiny": given.tiny, **({} if given.layers is None else {"layers": given.layers})}
        # What the minimum is takes a plan that is refused, and then another: of all rows it is ready last.
        niceness = _NICE if given.jobs > 1 and row != "memopt:least" else 0
        words = {"name": self.model, "device": given.device, "dtype": given.dtype, "changes": changes}
        return Job(
            Source("training_row:made", {**words, "inputs": self.inputs}),
            row,
            training=True,
            device=given.device,
            dtype=given.dtype,
            repeats=given.repeats,
            path=(str(HERE), *(str(Path(entry).resolve()) for entry in sys.path)),
            program=(str(HERE / "training_row.py"),),
            more={
                "budget_bytes": budget,
                "backend": given.backend,
                "offload": given.offload,
                "niceness": niceness,
                "profile": profiled(given, self.model, row),
            },
        )

    def take(self, row: str, said: dict[str, Any]) -> None:
        """Note what a row's process said in the end, and write the file."""
        found = {"row": row, **{key: value for key, value in said.items() if key not in ("kind", "reason", "seconds")}}
        if "reason" in said and said.get("minimum_bytes", 0) <= said.get("budget_bytes", 0):
            found["error"] = said["reason"]
        if "seconds" in said:
            found["seconds"], found["fastest_seconds"] = statistics.median(said["seconds"]), min(said["seconds"])
            found["peak_bytes"] = found.pop("allocated_bytes")
        if row == "compile" and self.reference is None and "seconds" in said:
            # A budget is on what is reserved: what torch.compile must be given to run is the whole of it.
            self.reference = found.get("reserved_bytes", found["peak_bytes"])
        self.rows[row] = found
        self.write()

    def line(self, row: str) -> str:
        return f"{self.model:12} {line_of(self.rows[row])}"

    def in_order(self) -> list[dict[str, Any]]:
        return [self.rows[row] for row in self.wanted if row in self.rows]

    def write(self) -> None:
        if self.given.json:
            path = Path(self.given.json.replace("{model}", self.model))
            path.write_text(json.dumps(self.described(), indent=1) + "\n")

    def described(self) -> dict[str, Any]:
        given, cuda = self.given, self.given.device.startswith("cuda")
        settings = {"model": self.model, "reference_bytes": self.reference, **self.inputs}
        of_memopt = ("backend", "offload")
        for key in ("tiny", "layers", "dtype", "device", *of_memopt, "repeats", "jobs", "seconds", "shared_caches"):
            if getattr(given, key) is not None:
                settings[key] = getattr(given, key)
        return {
            "machine": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
            **({"driver": driver_version()} if cuda else {}),
            "cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "memopt": memopt.__version__,
            "allocator": ALLOCATOR if cuda else "",
            "settings": settings,
            "rows": self.in_order(),
        }


def share_of(row: str) -> float | None:
    """A row's budget, as a share of the reference; None for those that have no such budget."""
    kind, _, share = row.partition(":")
    return float(share) if kind == "memopt" and share != "least" else None


def profiled(given: argparse.Namespace, model: str, row: str) -> bool:
    """Whether a row's step is looked into."""
    return given.profile == "all" or f"{model}:{row}" in given.profile.split(",")


def run(given: argparse.Namespace, tables: Sequence[Table], folder: Path) -> None:
    """Prepare and time all rows of all models."""
    pool = Pool(folder, given.timeout, False, given.jobs, given.seconds, shared_caches=given.shared_caches)
    fill(tables, pool, Table.line)
    for table in tables:
        for row in table.wanted:
            if row not in table.rows:
                table.take(row, {"reason": "its budget is a share of the row `compile`, which has no figures"})
                print(table.line(row), flush=True)


def line_of(row: dict[str, Any]) -> str:
    cells = [row.get(key) for key in ("budget_bytes", "predicted_bytes", "peak_bytes", "reserved_bytes")]
    text = " ".join(f"{'-' if cell is None else f'{cell / 1e6:,.2f}':>11}" for cell in cells)
    if "seconds" not in row:
        return f"{row['row']:13} {text} {why_not(row)}"
    by = "operator by operator" if any("operator by operator" in note for note in row.get("notes", ())) else ""
    if row.get("retries_per_step"):
        by += f" hands its cache back {row['retries_per_step']:.1f} times a step"
    parts = [row.get(key) for key in ("first_step_seconds", "planning_seconds", "compile_seconds")]
    seconds = " ".join(f"{'-' if part is None else f'{part:.1f}':>8}" for part in parts)
    busy = row.get("kernels_seconds")
    busy_ms = "-" if busy is None else f"{busy * 1e3:.2f}"
    return f"{row['row']:13} {text} {row['seconds'] * 1e3:9.2f} {busy_ms:>8} {seconds} {by}"


def why_not(row: dict[str, Any]) -> str:
    return str(row.get("error") or f"refused: the minimum is {row['minimum_bytes'] / 1e6:,.2f} MB")


def references(text: str, models: Sequence[str]) -> dict[str, int]:
    """What torch.compile is known to reserve: one number of bytes, or one for each model by its name."""
    pairs = [item.rpartition("=") for item in text.split(",") if item]
    return {name: int(float(size)) for given, _, size in pairs for name in ([given] if given else models)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2_medium", help=f"one or several of {', '.join(SIZES)}")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--offload", action="store_true", help="values may wait on the host: memopt's pass `offload`")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layers", type=int, help="fewer blocks than the model has")
    parser.add_argument("--profile", default="", help="where a step's time goes (see kernels.py): MODEL:ROW,… or all")
    parser.add_argument("--jobs", type=int, default=1, help="rows prepared at a time")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds in which a row is prepared")
    parser.add_argument("--seconds", type=float, help="for everything together")
    parser.add_argument("--reference-bytes", default="", help="N, or model=N,…: what torch.compile is known to reserve")
    parser.add_argument(
        "--shared-caches",
        action="store_true",
        help="rows find the kernels and the measured costs that other rows of this run left: first steps are not cold",
    )
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--only", default="", help="MODEL:ROW,…: of a model that is named here, these rows alone")
    parser.add_argument("--json", help="a file; with several models, one for each {model}")
    given = parser.parse_args()
    given.rows, models = given.rows.split(","), given.model.split(",")
    given.only = [tuple(item.split(":", 1)) for item in given.only.split(",") if item]
    if unknown := [name for name in models if name not in SIZES]:
        parser.error(f"unknown model {unknown[0]}")
    if given.json and len(models) > 1 and "{model}" not in given.json:
        parser.error("--json needs {model} in it where there are several")

    known = references(given.reference_bytes, models)
    tables = [Table(given, model, known.get(model)) for model in models]
    heads = " ".join(f"{name:>11}" for name in ("budget MB", "predicted", "allocated", "reserved"))
    print(f"{'':19} {'row':13} {heads} {'ms':>9} {'kernels':>8} {'first s':>8} {'plan s':>8} {'code s':>8}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run(given, tables, Path(folder))
    for table in tables if given.profile else ():
        print(kernels.table(table.in_order()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
