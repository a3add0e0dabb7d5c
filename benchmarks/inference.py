"""Inference beside the peers: eager, torch.compile in three modes, ONNX Runtime, and memopt.

Every row runs in a process of its own, with an empty compile cache. Rows are prepared side by side (--jobs) and timed
one after another, while the others wait. memopt chooses by timing, which needs the device for itself: its rows are
prepared side by side only to fill their caches, and once more in a new process when it is their turn.
Peers get convolutional models channels-last; memopt gets them as they are.
"memopt-freeze" is memopt with allow=("freeze",): a peer with freezing=True has that consent as well.

python benchmarks/inference.py --device cuda --dtype float16 --json benchmarks/results/inference_h100.json
python benchmarks/inference.py --tiny --models resnet50,bert_base

Columns: median latency of one call, the device waited for; what torch's allocator reserved at most in steady calls
(onnxruntime: what the device lost to its session); what the device got back when the process ended; and the largest
error against the same weights in float64, as a share of the largest value.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference_row import SIZES, worker, write_reference
from row_process import RowProcess, used_bytes

FOLDABLE = ("resnet50", "densenet121")  # with batch norms: consent to freezing changes nothing elsewhere
ROWS = ("memopt", "memopt-freeze", "freezing", "reduce-overhead", "onnxruntime", "eager", "compile")
ALLOCATOR = "expandable_segments:True"


# -- all rows ---------------------------------------------------------------------------------------------------------


class Row(RowProcess):
    """One that comes after another of the same row has its compile caches, and prepares itself at its turn."""

    def __init__(
        self, given: argparse.Namespace, model: str, row: str, reference: Path, after: Row | None = None
    ) -> None:
        command = [sys.executable, __file__, *given.passed, "--model", model, "--worker", row]
        command += ["--reference", str(reference)]
        self.cold_seconds = 0.0
        if after is not None:
            command += ["--cold-seconds", str(after.cold_seconds)]
        cache = tempfile.TemporaryDirectory() if after is None else after.cache
        environment = {
            "PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR, "TORCHINDUCTOR_COMPILE_THREADS": str(given.threads),
            # What is measured beside others is not for a row that is alone.
            "MEMOPT_CACHE_DIR": f"{cache.name}/{'alone' if after else 'beside'}",
        }  # fmt: skip
        super().__init__(model, row, command, environment, cache)

    def is_ready(self, seconds: float | None = None) -> bool:
        """Whether it waits for its turn, or has ended, within so many seconds; it has said how long that took."""
        said = self.wait_for("READY ", seconds)
        self.cold_seconds = float(said or 0.0)
        return said is not None


def run_rows(
    given: argparse.Namespace, wanted: Sequence[tuple[str, str]], folder: Path, result: dict[str, Any]
) -> None:
    """Run the rows and add them to the result, which is written after each: the run may be cut short."""
    cuda = given.device.startswith("cuda")
    for first in range(0, len(wanted), given.jobs):
        rows = [Row(given, model, row, folder / f"{model}.pt") for model, row in wanted[first : first + given.jobs]]
        deadline = time.monotonic() + given.patience
        late = [row for row in rows if not row.is_ready(max(0.0, deadline - time.monotonic()))]
        for row in late:
            row.is_ready()
        for row in alone(given, rows, folder):
            result["rows"].append(row.finish(cuda))
            print(line_of(result["rows"][-1]), flush=True)
            if given.json:
                given.json.write_text(json.dumps(result, indent=1) + "\n")


def alone(given: argparse.Namespace, rows: Sequence[Row], folder: Path) -> list[Row]:
    """The rows, ready; for those of memopt that were prepared beside others, new ones that do so at their turn."""
    if given.jobs == 1:
        return list(rows)
    found = []
    for row in rows:
        if row.row.startswith("memopt") and row.cold_seconds:
            row.kill()
            row = Row(given, row.model, row.row, folder / f"{row.model}.pt", after=row)
        found.append(row)
    for row in found:
        if row not in rows:
            row.is_ready()
    return found


def line_of(row: dict[str, Any]) -> str:
    name = f"{row['model']:12} {row['row']:16}"
    if "seconds" not in row:
        return f"{name} {row['error_text']}"
    sizes = [row.get(key) for key in ("reserved_bytes", "process_bytes")]
    text = " ".join(f"{'-' if size is None else f'{size / 2**20:,.0f}':>9}" for size in sizes)
    return f"{name} {row['seconds'] * 1e3:9.3f} {text} {row['error']:9.1e} {row['first_call_seconds']:8.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=1, help="rows prepared at a time")
    parser.add_argument("--patience", type=float, default=1e6, help="seconds after which rows that are ready are timed")
    parser.add_argument("--threads", type=int, default=2, help="processes that compile kernels, per row")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="MODEL:ROW,…: these rows instead of all models in all rows")
    parser.add_argument("--kernels", type=int, default=0, help="how many kernels of memopt and of freezing to list")
    for hidden in ("--model", "--worker", "--reference"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--cold-seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.passed = sys.argv[1:]
    if given.worker:
        (write_reference if given.worker == "reference" else worker)(given)
        return 0
    import torch

    import memopt
    from memopt.comparison.processes import driver_version

    cuda = given.device.startswith("cuda")
    models = given.models.split(",")
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "driver": (driver_version() or "not known") if cuda else "",
        "torch": torch.__version__,
        "memopt": memopt.__version__,
        "allocator": ALLOCATOR if cuda else "",
        "settings": {
            "tiny": given.tiny, "dtype": given.dtype, "device": given.device, "repeats": given.repeats,
            "jobs": given.jobs, "sizes": {} if given.tiny else {model: SIZES[model] for model in models},
        },
        "rows": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        references = [Row(given, model, "reference", folder / f"{model}.pt") for model in models]
        for reference in references:
            reference.process.wait()
        used_bytes(cuda)
        print(f"{'':29} {'ms':>9} {'reserved':>9} {'process':>9} {'error':>9} {'first s':>8}   (sizes in MiB)")
        wanted = [
            (model, row)
            for row in given.rows.split(",")
            for model in models
            if row != "memopt-freeze" or model in FOLDABLE
        ]
        if given.only:
            wanted = [(pair.split(":", 1)[0], pair.split(":", 1)[1]) for pair in given.only.split(",")]
        run_rows(given, wanted, folder, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
