"""What `memopt.monitor` costs: steps of eager training with and without it, by turns, to benchmarks/results.

python -m benchmarks.monitoring --device cpu
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import memopt
from memopt import models

RESULTS = Path(__file__).parent / "results"


def training(name: str, tiny: bool, batch: int, device: str) -> Callable[[int], None]:
    """So many steps of a model's training, AdamW included."""
    torch.manual_seed(0)
    model = models.build(name, tiny=tiny).to(device).train()
    inputs = {key: value.to(device) for key, value in model.example_inputs(batch, labels=True).items()}
    optimizer = torch.optim.AdamW(model.parameters())

    def run(steps: int) -> None:
        for _ in range(steps):
            out = model(**inputs)
            (out if isinstance(out, torch.Tensor) else out[0]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if device != "cpu":
            torch.cuda.synchronize()

    return run


def measured(name: str, tiny: bool, batch: int, device: str, steps: int, rounds: int) -> dict[str, object]:
    """Milliseconds of a step: the median of rounds by turns, the monitor's entering and leaving left out."""
    run = training(name, tiny, batch, device)
    run(3)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    around = []
    for turn in range(2 * rounds):
        watched = bool(turn % 2)
        began = time.perf_counter()
        with memopt.monitor(device=device) if watched else contextlib.nullcontext():
            start = time.perf_counter()
            run(steps)
            end = time.perf_counter()
        seconds[watched].append((end - start) / steps)
        if watched:
            around.append(start - began + time.perf_counter() - end)
    plain, monitored = (statistics.median(seconds[which]) * 1e3 for which in (False, True))
    return {
        "model": name + (" (tiny)" if tiny else ""),
        "batch": batch,
        "milliseconds": round(plain, 2),
        "monitored_milliseconds": round(monitored, 2),
        "added": round(monitored / plain - 1, 3),
        "enter_and_leave_milliseconds": round(statistics.median(around) * 1e3, 1),
    }


def main() -> None:
    """Write monitor_<device>.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cases = [("gpt2", True, 4), ("resnet18", False, 8)] if args.device == "cpu" else [("gpt2", False, 8)]
    cases += [] if args.device == "cpu" else [("gpt2", True, 4), ("resnet50", False, 64)]
    machine = platform.machine() if args.device == "cpu" else torch.cuda.get_device_name()
    rows = [measured(*case, args.device, args.steps, args.rounds) for case in cases]
    found = {"torch": torch.__version__, "machine": machine, "threads": torch.get_num_threads(), "rows": rows}
    kind = "cpu" if args.device == "cpu" else machine.split()[-1].lower()
    (RESULTS / f"monitor_{kind}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
