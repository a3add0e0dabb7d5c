"""How long a first training step takes: torch.compile and memopt, with caches on disk empty and full, phase by phase.

Every row runs in a process of its own, one after another: nothing else should run on the machine.

python benchmarks/first_step.py --model gpt2_medium --device cuda --dtype bfloat16 --json out.json
python benchmarks/first_step.py --model gpt2_medium --layers 8 --tiny --shares 0.5
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.row_process import run_alone
from benchmarks.training import SIZES
from memopt.comparison.pool import ALLOCATOR

# -- one row, in a process of its own ---------------------------------------------------------------------------------


def worker(given: argparse.Namespace) -> int:
    import torch

    import memopt

    torch.manual_seed(0)
    layers = {"layers": given.layers} if given.layers else {}
    model = memopt.models.build(given.model, tiny=given.tiny, **layers).to(given.device, getattr(torch, given.dtype))
    sizes = {} if given.tiny else {k: v for k, v in SIZES[given.model].items() if k != "batch"}
    inputs = model.example_inputs(given.batch, labels=True, **sizes)
    cuda = given.device.startswith("cuda")

    def step() -> float:
        started = time.perf_counter()
        model.zero_grad()
        run(**inputs).backward()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    run = torch.compile(model) if given.worker == "compile" else memopt.compile(model, given.budget_bytes)
    if cuda:
        torch.cuda.synchronize()  # the device is there before the clock starts
    row: dict[str, Any] = {"row": given.worker, "first_step_seconds": step()}
    model.zero_grad()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    row["seconds"] = min(step() for _ in range(5))
    if given.worker == "compile":
        row["peak_bytes"] = torch.cuda.max_memory_allocated() if cuda else taken(model, inputs)
    else:
        # Reserved, as the budget means it: what a captured step uses is not allocated while it is replayed.
        row["peak_bytes"] = torch.cuda.max_memory_reserved() if cuda else None
        row.update(budget_bytes=run.report.budget_bytes, phases=dict(run.report.seconds), notes=list(run.report.notes))
    print("ROW " + json.dumps(row), flush=True)
    return 0


def taken(model: Any, inputs: dict[str, Any]) -> int:
    """What torch.compile's step takes on CPU, about: its operations one by one."""
    import memopt

    return memopt.estimate(model, inputs).total


# -- all rows ---------------------------------------------------------------------------------------------------------


def run_row(given: argparse.Namespace, row: str, caches: Path, budget: int | None) -> dict[str, Any]:
    command = [sys.executable, __file__, *given.passed, "--worker", row]
    if budget is not None:
        command += ["--budget-bytes", str(budget)]
    return run_alone(row, command, caches, {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR})


def described(given: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    import memopt
    from memopt.comparison.processes import driver_version

    cuda = given.device.startswith("cuda")
    return {
        "machine": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "driver": (driver_version() or "not known") if cuda else "",
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "memopt": memopt.__version__,
        "settings": {
            "model": given.model, "tiny": given.tiny, "layers": given.layers, "batch": given.batch,
            "dtype": given.dtype, "device": given.device,
        },
        "rows": rows,
    }  # fmt: skip


def line_of(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['row']:12} {row['cache']:5} {row['error']}"
    peak = row.get("peak_bytes")
    line = f"{row['row']:12} {row['cache']:5} {row['first_step_seconds']:8.1f} s first, {row['seconds'] * 1e3:8.1f} ms"
    line += "" if peak is None else f", {peak / 1e6:,.0f} MB"
    phases = sorted(row.get("phases", {}).items(), key=lambda item: -item[1])
    return "\n".join([line, *(f"{'':20}{seconds:8.1f}   {name}" for name, seconds in phases), *row.get("notes", ())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2_medium", choices=sorted(SIZES))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int, help="of blocks, where they are to be others than the model's")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shares", default="0.5", help="budgets, as shares of torch.compile's own peak")
    parser.add_argument("--caches", default="empty,full", help="of each row: once with empty ones, or again as well")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--budget-bytes", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.passed = sys.argv[1:]
    given.batch = given.batch or (4 if given.tiny else SIZES[given.model]["batch"])
    if given.worker:
        return worker(given)
    rows: list[dict[str, Any]] = []
    base: int | None = None
    for name in ("compile", *(f"memopt:{share}" for share in given.shares.split(","))):
        with tempfile.TemporaryDirectory() as caches:
            for cache in given.caches.split(","):
                share = name.partition(":")[2]
                budget = None if not share or base is None else int(float(share) * base)
                row = run_row(given, name, Path(caches), budget)
                rows.append({**row, "cache": cache})
                print(line_of(rows[-1]), flush=True)
                if given.json:
                    given.json.write_text(json.dumps(described(given, rows), indent=1) + "\n")
                base = base or row.get("peak_bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
