"""Whole training steps, the optimizer's among them: the predicted peak beside what the device really holds.

Each row is a process of its own: a model, an optimizer and an engine, under a budget below what the step takes without
one. The first step plans; the next three are measured, forward, backward and `optimizer.step()`.

python benchmarks/optimizers.py --device cuda --jobs 6 --json out.json
python benchmarks/optimizers.py --tiny
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

# Model, type of its numbers, its inputs: sizes at which the optimizer's state is a large part of the whole.
CASES: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2_medium": ("bfloat16", {"batch": 2, "sequence": 1024}),
    "resnet50": ("float32", {"batch": 16, "resolution": 224}),
}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW, loop": ("AdamW", {"foreach": False}),
    "AdamW, foreach": ("AdamW", {"foreach": True}),
    "AdamW, fused": ("AdamW", {"fused": True}),
    "SGD, momentum": ("SGD", {"momentum": 0.9}),
    "Adafactor": ("Adafactor", {}),
}
ENGINES = {"aten": tuple(OPTIMIZERS), "inductor": ("AdamW, foreach",)}
STEPS = 3
SHARE = 0.85  # of what a step takes without a budget; where that is too little, the least and 2 %


# -- one row, in a process of its own ---------------------------------------------------------------------------------


def worker(given: argparse.Namespace) -> int:
    import torch

    import memopt
    from memopt.memory.allocator import retries_of
    from memopt.memory.optimizer import optimizer_footprint

    name, title, engine = given.worker.split(":")
    kind, options = OPTIMIZERS[title]
    cuda = given.device.startswith("cuda")
    dtype, sizes = ("float32", {"batch": 4}) if given.tiny else CASES[name]
    torch.manual_seed(0)
    model = memopt.models.build(name, tiny=given.tiny).to(given.device, getattr(torch, dtype))
    inputs = model.example_inputs(sizes["batch"], labels=True, **{k: v for k, v in sizes.items() if k != "batch"})
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-4, **options)
    run = memopt.compile(model, SHARE, optimizer=optimizer, backend=engine)

    def steps(count: int = STEPS) -> None:
        for _ in range(count):
            run(**inputs).backward()
            optimizer.step()
            optimizer.zero_grad()

    try:
        steps(1)
    except memopt.BudgetError as error:  # nothing was run
        torch._dynamo.reset()
        run = memopt.compile(model, int(1.02 * error.minimum_bytes), optimizer=optimizer, backend=engine)
        steps(1)
    report, counted = run.report, optimizer_footprint(optimizer, list(model.parameters()))
    row: dict[str, Any] = {"model": name, "dtype": dtype, **sizes, "optimizer": title, "backend": engine}
    row.update(budget_bytes=report.budget_bytes, predicted_bytes=report.peak_bytes, notes=list(report.notes))
    before = torch.cuda.memory_allocated() if cuda else held(model, inputs, optimizer)
    retried = retries_of(torch.device(given.device)) if cuda else 0
    found = memopt.measure(steps, device=given.device)
    row.update(peak_bytes=before + found.peak_bytes, reserved_bytes=found.reserved_bytes)
    row["retries_per_step"] = (retries_of(torch.device(given.device)) - retried) / STEPS if cuda else 0.0
    run(**inputs).backward()
    alone = memopt.measure(optimizer.step, device=given.device)
    row.update(state_predicted_bytes=counted.state_bytes, state_bytes=state_bytes(optimizer, given.device))
    row.update(step_predicted_bytes=counted.step_peak_bytes, step_peak_bytes=alone.peak_bytes)
    print("ROW " + json.dumps(row), flush=True)
    return 0


def state_bytes(optimizer: Any, device: str) -> int:
    """What the optimizer's state takes of the device."""
    import torch

    from memopt.memory.resident import storage_bytes

    leaves = [leaf for values in optimizer.state.values() for leaf in values.values()]
    here = torch.device(device).type
    return storage_bytes([leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type == here])


def held(model: Any, inputs: dict[str, Any], optimizer: Any) -> int:
    """What a CPU holds between steps: its allocator counts only what is allocated while it is watched."""
    from memopt.memory.resident import storage_bytes

    return storage_bytes([*model.parameters(), *model.buffers(), *inputs.values()]) + state_bytes(optimizer, "cpu")


# -- all rows ---------------------------------------------------------------------------------------------------------


def row_of(given: argparse.Namespace, spec: str) -> dict[str, Any]:
    """Run one row; one that failed says why."""
    command = [sys.executable, __file__, *given.passed, "--worker", spec]
    with tempfile.TemporaryFile("w+") as errors:
        output = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True).stdout
        found = [line[4:] for line in output.splitlines() if line.startswith("ROW ")]
        if found:
            return dict(json.loads(found[0]))
        errors.seek(0)
        last = [line.strip() for line in errors if "Error" in line][-1:]
    model, optimizer, engine = spec.split(":")
    return {"model": model, "optimizer": optimizer, "backend": engine, "error": (last or ["it ended"])[0][:300]}


def line_of(row: dict[str, Any]) -> str:
    start = f"{row['model']:12} {row['optimizer']:15} {row['backend']:9}"
    if "error" in row:
        return f"{start} {row['error']}"
    keys = ("budget_bytes", "predicted_bytes", "peak_bytes", "reserved_bytes")
    cells = [f"{row[key] / 1e6:10,.2f}" if row[key] is not None else f"{'-':>10}" for key in keys]
    pairs = (("state_predicted_bytes", "state_bytes"), ("step_predicted_bytes", "step_peak_bytes"))
    own = " ".join(f"{row[counted] / 1e6:9,.2f} {row[real] / 1e6:9,.2f}" for counted, real in pairs)
    return f"{start} {' '.join(cells)} {row['predicted_bytes'] / row['peak_bytes'] - 1:+7.2%} {own}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.passed = sys.argv[1:]
    if given.worker:
        return worker(given)
    specs = [f"{model}:{title}:{engine}" for model in given.models for engine in ENGINES for title in ENGINES[engine]]
    print(f"{'MB':38} {'budget':>10} {'predicted':>10} {'allocated':>10} {'reserved':>10} {'error':>7} "
          f"{'state':>9} {'real':>9} {'step':>9} {'real':>9}")  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(given.jobs) as pool:
        running = {pool.submit(row_of, given, spec): spec for spec in specs}
        for row in as_completed(running):
            found[running[row]] = row.result()
            print(line_of(row.result()), flush=True)
            if given.json:  # what a run that is cut short leaves is whole
                rows = [found[spec] for spec in specs if spec in found]
                given.json.write_text(json.dumps(described(given, rows), indent=1) + "\n")
    return int(any("error" in row for row in found.values()))


def described(given: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    import memopt
    from memopt.comparison.processes import driver_version

    cuda = given.device.startswith("cuda")
    return {
        "machine": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "driver": (driver_version() or "not known") if cuda else "",
        "cuda": torch.version.cuda if cuda else "",
        "torch": torch.__version__,
        "memopt": memopt.__version__,
        "settings": {"device": given.device, "tiny": given.tiny, "jobs": given.jobs, "steps": STEPS},
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
