"""One training step of a reference model at several budgets, beside eager PyTorch: bytes, time, gradient error.

python benchmarks/step.py --model gpt2_medium --batch 16 --sequence 1024 --device cuda --dtype bfloat16 --json out.json
python benchmarks/step.py --tiny
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import memopt


def resident_bytes(model: torch.nn.Module, inputs: dict[str, Any]) -> int:
    storages = {}
    for tensor in (*model.parameters(), *model.buffers(), *pytree.tree_leaves(inputs)):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def difference(found: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """The largest relative difference of a gradient, in the Euclidean norm."""
    pairs = [(a.detach().cpu().double(), b.double()) for a, b in zip(found, reference, strict=True)]
    return max(float(((a - b).norm() / b.norm().clamp_min(1e-30)).item()) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int)
    parser.add_argument("--resolution", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="aten")
    parser.add_argument("--budgets", default="1.0,0.8,0.6,0.5,0.4", help="shares of eager's measured peak")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()

    torch.manual_seed(0)
    model = memopt.models.build(given.model, tiny=given.tiny).to(given.device, getattr(torch, given.dtype))
    sizes = {k: v for k, v in (("sequence", given.sequence), ("resolution", given.resolution)) if v is not None}
    inputs = model.example_inputs(given.batch, labels=True, **sizes)
    base = resident_bytes(model, inputs)
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def step(run: Callable[..., Any]) -> None:
        torch.manual_seed(1)
        run(**inputs).backward()

    def reset() -> None:
        model.zero_grad()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(state[name])

    def measured(run: Callable[..., Any]) -> tuple[int, int | None, float, list[torch.Tensor]]:
        step(run)
        reset()
        found = memopt.measure(step, run, device=given.device)
        gradients = [parameter.grad.detach().cpu() for parameter in model.parameters() if parameter.grad is not None]
        seconds = []
        for _ in range(given.repeats):
            reset()
            synchronize()
            started = time.perf_counter()
            step(run)
            synchronize()
            seconds.append(time.perf_counter() - started)
        reset()
        return base + found.peak_bytes, found.reserved_bytes, statistics.median(seconds), gradients

    def synchronize() -> None:
        if given.device.startswith("cuda"):
            torch.cuda.synchronize()

    peak, reserved, eager_seconds, reference = measured(model)
    eager_row = {"setting": "eager", "peak_bytes": peak, "reserved_bytes": reserved, "seconds": eager_seconds}
    step(model)
    # Kernels that add in a varying order make even two eager steps differ: the yardstick for the rows below.
    eager_row["gradient_error"] = difference([p.grad for p in model.parameters() if p.grad is not None], reference)
    reset()
    rows: list[dict[str, Any]] = [eager_row]
    for share in [float(text) for text in given.budgets.split(",")]:
        budget = int(peak * share)
        row: dict[str, Any] = {"setting": f"memopt {share:.0%}", "budget_bytes": budget}
        torch._dynamo.reset()
        started = time.perf_counter()
        try:
            compiled = memopt.compile(model, budget, backend=given.backend)
            step(compiled)
        except memopt.BudgetError as error:
            row["minimum_bytes"] = error.minimum_bytes
            rows.append(row)
            continue
        synchronize()
        row["first_step_seconds"] = time.perf_counter() - started
        reset()
        row["peak_bytes"], row["reserved_bytes"], row["seconds"], gradients = measured(compiled)
        row["predicted_bytes"] = compiled.report.peak_bytes
        row["minimum_bytes"] = compiled.report.minimum_bytes
        row["gradient_error"] = difference(gradients, reference)
        rows.append(row)

    machine = torch.cuda.get_device_name() if given.device.startswith("cuda") else platform.processor() or "cpu"
    result = {
        "machine": machine,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "memopt": memopt.__version__,
        "settings": {key: str(value) for key, value in vars(given).items() if key != "json"},
        "rows": rows,
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{given.model} on {machine}, torch {torch.__version__}, {given.dtype}, backend {given.backend}")
    head = ("budget MB", "predicted", "measured", "reserved")
    print(f"{'setting':14} " + " ".join(f"{name:>10}" for name in head) + f" {'ms':>9} {'grad err':>9}")
    for row in rows:
        cells = [row.get(key) for key in ("budget_bytes", "predicted_bytes", "peak_bytes", "reserved_bytes")]
        text = " ".join(f"{'-' if cell is None else f'{cell / 1e6:.2f}':>10}" for cell in cells)
        note = f"infeasible, minimum {row['minimum_bytes'] / 1e6:.2f} MB" if "seconds" not in row else ""
        milliseconds = f"{row['seconds'] * 1e3:9.2f}" if "seconds" in row else ""
        error = f"{row['gradient_error']:9.1e}" if "gradient_error" in row else ""
        print(f"{row['setting']:14} {text} {milliseconds} {error} {note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
