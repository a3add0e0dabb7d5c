"""Inference within budgets that stretches in chunks of the batch keep: what is planned, what it takes, and how long.

python benchmarks/chunks.py --device cuda --dtype float16 --json benchmarks/results/chunks_h100.json
python benchmarks/chunks.py --tiny

For each budget: which operations run in chunks; the median latency of a call, the device waited for; what torch's
allocator reserved at most in steady calls; and the largest error against float64, as a share of the largest value. The
rows are compiled side by side, each in a process of its own, and timed one after the other.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES = {"batch": 32, "resolution": 224}
NONE = "none"


def row(given: argparse.Namespace) -> dict[str, Any]:
    """Compile, run and time the model within one budget."""
    import torch

    import memopt

    torch.manual_seed(0)
    dtype = getattr(torch, given.dtype)
    model = memopt.models.build(given.model, tiny=given.tiny).eval()
    inputs = model.example_inputs(**({"batch": 8} if given.tiny else SIZES))
    with torch.no_grad():  # on the CPU: nothing of it may be left in the device's allocator
        exact = model.double()(**{key: value[:2].double() for key, value in inputs.items()})
    model.to(dtype).to(given.device)
    inputs = {key: value.to(dtype).to(given.device) for key, value in inputs.items()}
    budget = None if given.budget == NONE else given.budget
    allow = ("freeze",) if given.freeze else ()
    began = time.perf_counter()
    found: dict[str, Any] = {"budget": given.budget, "freeze": given.freeze}
    with torch.no_grad():
        compiled = memopt.compile(model, budget, allow=allow, backend=given.backend)
        try:
            result = compiled(**inputs)
        except memopt.BudgetError as error:
            return {**found, "refused": str(error), "notes": []}
        found["first_call_seconds"] = time.perf_counter() - began
        error = (result[:2].cpu().double() - exact).abs().max() / exact.abs().max()
        del result, exact
        with open(given.lock, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one row is timed at a time
            found |= timed(compiled, inputs, torch.device(given.device))
    report = compiled.report
    return {**found, "error": float(error), "backend": report.backend, "notes": list(report.notes)}


def timed(compiled: Any, inputs: dict[str, Any], device: Any) -> dict[str, Any]:
    """The median of calls in milliseconds, and the bytes reserved meanwhile."""
    import torch

    on_gpu = device.type == "cuda"
    for _ in range(3):
        compiled(**inputs)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(100 if on_gpu else 5):
        began = time.perf_counter()
        compiled(**inputs)
        if on_gpu:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    peak = compiled.report.measured_peak_bytes or compiled.report.peak_bytes
    reserved = int(torch.cuda.max_memory_reserved()) if on_gpu else peak
    allocated = int(torch.cuda.max_memory_allocated()) if on_gpu else peak
    return {"milliseconds": statistics.median(taken) * 1e3, "reserved": reserved, "allocated": allocated}


def environment(device: str) -> dict[str, str]:
    """Device, driver and versions."""
    import torch

    from memopt.comparison.processes import driver_version

    found = {"torch": torch.__version__, "python": platform.python_version(), "device": platform.processor()}
    if device == "cuda":
        driver = driver_version() or "not known"
        found |= {"device": torch.cuda.get_device_name(), "driver": driver, "cuda": str(torch.version.cuda)}
    return found


def main() -> None:
    """Run all rows, or, in a child, one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend")
    parser.add_argument("--budgets", default="none,160MiB,140MiB,120MiB")
    parser.add_argument("--freeze", action="store_true", help="with allow=('freeze',)")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget", help=argparse.SUPPRESS)
    parser.add_argument("--lock", help="a file that only one row of several runs holds while it is timed")
    given = parser.parse_args()
    if given.budget is not None:
        print(json.dumps(row(given)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--lock", given.lock or os.path.join(folder, "lock")]
        budgets = given.budgets.split(",")
        children = [subprocess.Popen([*command, "--budget", b], stdout=subprocess.PIPE, text=True) for b in budgets]
        for budget, child in zip(budgets, children, strict=True):
            lines = (child.communicate()[0] or "").strip().splitlines()
            if child.returncode or not lines:
                rows.append({"budget": budget, "refused": f"the process ended with {child.returncode}", "notes": []})
            else:
                rows.append(json.loads(lines[-1]))
    for found in rows:
        print(text(found))
    if given.json is not None:
        settings = {"model": given.model, "dtype": given.dtype, "sizes": SIZES, "freeze": given.freeze}
        given.json.write_text(
            json.dumps({"environment": environment(given.device), **settings, "rows": rows}, indent=1)
        )


def text(found: dict[str, Any]) -> str:
    """One row for reading."""
    told = "; ".join(note for note in found["notes"] if "chunks" in note or "runs this model" in note)
    if "refused" in found:
        return f"{found['budget']:>8}  refused: {found['refused']}"
    mebi = found["reserved"] / 2**20, found["allocated"] / 2**20
    figures = f"{found['milliseconds']:8.3f} ms  {mebi[0]:8.1f} MiB reserved  {mebi[1]:8.1f} allocated"
    return f"{found['budget']:>8}  {found['backend']:>8}  {figures}  error {found['error']:.1e}  {told}"


if __name__ == "__main__":
    main()
