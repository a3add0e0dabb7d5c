"""Inference beside the peers: eager, torch.compile in three modes, ONNX Runtime, and memopt, within budgets or without.

Every row runs in a process of its own. Rows are prepared side by side (--jobs) in the order given, and each is timed as
soon as it is ready, while all others are stopped; then it is printed and written. memopt's rows choose kernels and
engines by timing: so do they then. After --seconds what is ready is still timed, and what is not is a row that says so.

Peers get convolutional models channels-last; memopt gets them as they are. "memopt-freeze" is memopt with
allow=("freeze",): a peer with freezing=True has that consent as well. "memopt:120MiB" is memopt within that budget,
"memopt/static" on that engine, "memopt/static:120MiB" both.

python benchmarks/inference.py --device cuda --dtype float16 --jobs 16 --seconds 370 --shared-caches --json out.json
python benchmarks/inference.py --tiny --models resnet50,bert_base
python benchmarks/inference.py --models resnet50 --rows memopt,memopt:160MiB,memopt-freeze:120MiB --device cuda

Columns: median latency of one call, the device waited for; what torch's allocator reserved at most in later calls
(onnxruntime: what the device lost to its session), and what of it was allocated; what the device got back when the
process ended; and the largest error against the same weights in float64, as a share of the largest value.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import memopt
from memopt.comparison.job import Job, Source
from memopt.comparison.pool import ALLOCATOR, Pool
from memopt.comparison.processes import driver_version
from memopt.convert.write import write_whole

HERE = Path(__file__).resolve().parent

SIZES: dict[str, dict[str, int]] = {
    "resnet50": {"batch": 32, "resolution": 224},
    "densenet121": {"batch": 32, "resolution": 224},
    "vit_b_16": {"batch": 32, "resolution": 224},
    "bert_base": {"batch": 8, "sequence": 128},
    "gpt2": {"batch": 4, "sequence": 512},
    "unet": {"batch": 8, "resolution": 256},
}
FOLDABLE = ("resnet50", "densenet121")  # with batch norms: consent to freezing changes nothing elsewhere
REFERENCE = "reference"  # the process that makes a model's weights, inputs and results
# What matters most first, and what takes nothing to prepare last.
ROWS = ("memopt", "freezing", "reduce-overhead", "onnxruntime", "memopt-freeze", "compile", "eager")


class Table:
    """All rows, and their file."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        self.wanted = [tuple(pair.split(":", 1)) for pair in given.only.split(",")] if given.only else every_row(given)
        self.models = list(dict.fromkeys(model for model, *_ in self.wanted))
        self.rows: dict[tuple[str, ...], dict[str, Any]] = {}

    def reference(self, model: str) -> Path:
        """The file of a model's weights, inputs, and results in float64; empty where they could not be made."""
        return self.folder / f"{model}.pt"

    def job(self, model: str, row: str) -> Job:
        """The process of one row, or of the reference."""
        given, reference = self.given, str(self.reference(model))
        words = {"name": model, "tiny": given.tiny}
        if row == REFERENCE:
            source = Source("inference_row:fresh", {**words, "sizes": {"batch": 2} if given.tiny else SIZES[model]})
        else:
            source = Source("inference_row:made", {**words, "dtype": given.dtype, "reference": reference})
        return Job(
            source,
            row,
            training=False,
            device=given.device,
            dtype=given.dtype,
            repeats=given.repeats,
            path=(str(HERE), *(str(Path(entry).resolve()) for entry in sys.path)),
            program=(str(HERE / "inference_row.py"),),
            more={"model": model, "reference": reference}
            | {name: getattr(given, name) for name in ("tiny", "kernels", "blocks")},
        )

    def take(self, model: str, row: str, said: dict[str, Any]) -> None:
        """Note what a row's process said in the end, and write the file."""
        found = {key: value for key, value in said.items() if key not in ("kind", "reason")}
        error = {"error_text": said["reason"]} if "reason" in said else {}
        self.rows[model, row] = {"model": model, "row": row, **found, **error}
        if self.given.json:
            write_whole(self.given.json, (json.dumps(self.described(), indent=1) + "\n").encode())

    def described(self) -> dict[str, Any]:
        given, cuda = self.given, self.given.device.startswith("cuda")
        names = ("tiny", "dtype", "device", "repeats", "jobs", "seconds", "shared_caches")
        sizes = {} if given.tiny else {model: SIZES[model] for model in self.models}
        return {
            "machine": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
            "driver": (driver_version() or "not known") if cuda else "",
            "cores": len(os.sched_getaffinity(0)),
            "torch": torch.__version__,
            "memopt": memopt.__version__,
            "allocator": ALLOCATOR if cuda else "",
            "settings": {**{name: getattr(given, name) for name in names}, "sizes": sizes},
            "rows": [self.rows[pair] for pair in self.wanted if pair in self.rows],
        }


def every_row(given: argparse.Namespace) -> list[tuple[str, ...]]:
    """All models in all rows; one kind of row after the other."""
    pairs = [(model, row) for row in given.rows.split(",") for model in given.models.split(",")]
    return [(model, row) for model, row in pairs if not row.startswith("memopt-freeze") or model in FOLDABLE]


def run(given: argparse.Namespace, table: Table) -> None:
    """Prepare and time all rows; each waits for its model's weights and results, which are made first."""
    started = time.perf_counter()
    pool = Pool(table.folder, given.timeout, False, given.jobs, given.seconds, shared_caches=given.shared_caches)
    pairs = [*((model, REFERENCE) for model in table.models), *table.wanted]
    owners = dict(zip(pool.add([table.job(*pair) for pair in pairs]), pairs, strict=True))
    for number, said in pool.run():
        model, row = owners[number]
        if row != REFERENCE:
            table.take(model, row, said)
            print(f"{time.perf_counter() - started:4.0f} s {line_of(table.rows[model, row])}", flush=True)
        elif "reason" in said:
            print(f"{model} {REFERENCE}: {said['reason']}", flush=True)
            table.reference(model).touch()  # so that nobody waits for it


def line_of(row: dict[str, Any]) -> str:
    name = f"{row['model']:12} {row['row']:16}"
    if "seconds" not in row:
        return f"{name} {row['error_text']}"
    sizes = [row.get(key) for key in ("reserved_bytes", "allocated_bytes", "process_bytes")]
    text = " ".join(f"{'-' if size is None else f'{size / 2**20:,.0f}':>9}" for size in sizes)
    told = "; ".join(note for note in row.get("notes", ()) if "chunks" in note or "runs this model" in note)
    return f"{name} {row['seconds'] * 1e3:9.3f} {text} {row['error']:9.1e} {row['first_call_seconds']:8.1f} {told}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--only", default="", help="MODEL:ROW,…: these rows instead of all models in all rows")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=1, help="rows prepared at a time")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds in which a row is prepared")
    parser.add_argument("--seconds", type=float, help="for everything together")
    parser.add_argument(
        "--shared-caches",
        action="store_true",
        help="rows find the kernels and the measured costs that other rows of this run left: first calls are not cold",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kernels", type=int, default=0, help="how many kernels of memopt and of freezing to list")
    parser.add_argument("--blocks", action="store_true", help="list the allocator's blocks of each row in the file")
    given = parser.parse_args()
    print(f"{'':36} {'ms':>9} {'reserved':>9} {'allocated':>9} {'process':>9} {'error':>9} {'first s':>8}   (MiB)")
    with tempfile.TemporaryDirectory() as folder:
        run(given, Table(given, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
