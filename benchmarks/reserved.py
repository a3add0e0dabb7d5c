"""What the allocator reserves under a budget, with the budget as the allocator's own limit and without.

Every row runs in a process of its own; rows are compiled side by side and timed one after another.

python benchmarks/reserved.py --device cuda --dtype bfloat16 --json out.json
python benchmarks/reserved.py --tiny
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Model, what is changed in it, its inputs: a Llama's equal layers, and a U-Net with tensors of many sizes.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama, 6 layers": ("llama_1b", {"layers": 6}, {"batch": 4, "sequence": 2048}),
    "unet": ("unet", {}, {"batch": 8, "resolution": 512}),
}


def worker(given: argparse.Namespace) -> int:
    import torch

    import memopt
    import memopt.step.guard
    from memopt.memory.allocator import retries_of

    case, share, limited = given.worker.split(":")
    if limited == "no":
        memopt.step.guard.StepGuard.allow = lambda *args: None
    name, changes, sizes = CASES[case]
    torch.manual_seed(0)
    if given.tiny:
        model = memopt.models.build(name, tiny=True)
        inputs = model.example_inputs(2, labels=True)
    else:
        model = memopt.models.build(name, **changes)
        inputs = model.example_inputs(labels=True, **sizes)
    model = model.to(given.device, getattr(torch, given.dtype))
    inputs = {
        key: value.to(given.device, getattr(torch, given.dtype) if value.is_floating_point() else None)
        for key, value in inputs.items()
    }
    cuda = given.device.startswith("cuda")
    free = memopt.plan(model, inputs)
    budget = int(free.minimum_bytes + float(share) * (free.unconstrained_bytes - free.minimum_bytes))
    torch._dynamo.reset()
    run = memopt.compile(model, budget, backend=given.backend)

    def step() -> None:
        run(**inputs).backward()
        model.zero_grad()
        if cuda:
            torch.cuda.synchronize()

    row: dict[str, Any] = {"case": case, "share": float(share), "limited": limited == "yes", "budget_bytes": budget}
    step()
    with open(given.lock, "w") as lock:  # one row at a time is timed
        fcntl.flock(lock, fcntl.LOCK_EX)
        step()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        retried = retries_of(torch.device("cuda")) if cuda else 0
        seconds = []
        for _ in range(given.repeats):
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
    row["seconds"] = statistics.median(seconds)
    row["predicted_bytes"] = run.report.peak_bytes
    row["notes"] = list(run.report.notes)
    if cuda:
        row["retries_per_step"] = (retries_of(torch.device("cuda")) - retried) / given.repeats
        row["peak_bytes"], row["reserved_bytes"] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print("ROW " + json.dumps(row), flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--shares", nargs="*", default=["0.5"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return worker(given)
    print(f"{'case':18} {'share':>5} {'limit':>5} {'budget':>9} {'predicted':>9} {'allocated':>9} {'reserved':>9} "
          f"{'over':>6} {'ms':>8} {'retries':>7}")  # fmt: skip
    with tempfile.NamedTemporaryFile() as lock:
        rows = run_rows(given, lock.name)
    return 0 if len(rows) == 2 * len(given.cases) * len(given.shares) else 1


def line_of(row: dict[str, Any]) -> str:
    taken, reserved = row.get("peak_bytes", 0), row.get("reserved_bytes", 0)
    return (
        f"{row['case']:18} {row['share']:5} {'yes' if row['limited'] else 'no':>5} {row['budget_bytes'] / 1e9:9.3f} "
        f"{row['predicted_bytes'] / 1e9:9.3f} {taken / 1e9:9.3f} {reserved / 1e9:9.3f} "
        f"{max(0, reserved - row['budget_bytes']) / 1e9:6.3f} {row['seconds'] * 1e3:8.1f} "
        f"{row.get('retries_per_step', 0):7.1f} {'; '.join(row['notes'])}"
    )


def write(given: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write what was measured so far: a run that is cut short leaves what it did."""
    import torch

    import memopt

    settings = {"dtype": given.dtype, "backend": given.backend, "repeats": given.repeats, "tiny": given.tiny}
    result = {
        "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "memopt": memopt.__version__,
        "settings": settings,
        "rows": rows,
    }
    given.json.write_text(json.dumps(result, indent=1) + "\n")


def run_rows(given: argparse.Namespace, lock: str) -> list[dict[str, Any]]:
    wanted = [
        f"{case}:{share}:{limited}" for case in given.cases for share in given.shares for limited in ("no", "yes")
    ]
    options = ["--device", given.device, "--dtype", given.dtype, "--backend", given.backend]
    options += ["--repeats", str(given.repeats), "--lock", lock, *(["--tiny"] if given.tiny else [])]
    rows: list[dict[str, Any]] = []
    running: list[tuple[str, subprocess.Popen[str]]] = []
    while wanted or running:
        while wanted and len(running) < given.jobs:
            spec = wanted.pop(0)
            command = [sys.executable, __file__, *options, "--worker", spec]
            running.append((spec, subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
        spec, process = running.pop(0)
        output = process.communicate()[0]
        lines = [line for line in output.splitlines() if line.startswith("ROW ")]
        if not lines:
            print(f"{spec}: failed with {process.returncode}", file=sys.stderr)
        for line in lines:
            rows.append(json.loads(line.removeprefix("ROW ")))
            print(line_of(rows[-1]), flush=True)
        if given.json:
            write(given, rows)
    return rows


if __name__ == "__main__":
    sys.exit(main())
