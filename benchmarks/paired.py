"""Steps of torch.compile and of memopt in turns, in one process: which is faster where medians differ by a percent.

Rows of benchmarks/training.py run one after another, and a GPU's clock drifts meanwhile. Here each pair of steps is
taken within a fifth of a second, first one of both and then the other, and of each pair the ratio counts: its median,
and the range in which the median of all such ratios lies with 95 % certainty (order statistics).

python benchmarks/paired.py --model gpt2_medium --device cuda --dtype bfloat16 --budget-bytes 18029215744 --json out.json
python benchmarks/paired.py --model gpt2_medium --tiny --pairs 9
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import memopt
from memopt.comparison.processes import driver_version

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.training import SIZES  # noqa: E402 - found once the root is on the path

_WARM = 5  # steps of each before any counts


def median_range(values: Sequence[float]) -> tuple[float, float]:
    """Values between which the median of what these are drawn from lies with 95 % certainty: by their order alone."""
    ordered = sorted(values)
    half_width = 1.96 * math.sqrt(len(ordered)) / 2
    low = max(0, math.floor(len(ordered) / 2 - half_width))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half_width))
    return ordered[low], ordered[high]


def stepper(run: Callable[..., Any], model: torch.nn.Module, inputs: dict[str, Any], cuda: bool) -> Callable[[], float]:
    """A training step without an optimizer, which returns its seconds, the device's work included."""

    def step() -> float:
        model.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        run(**inputs).backward()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2_medium", choices=sorted(SIZES))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--budget-bytes", type=int, help="memopt's; left out: no budget")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    cuda = given.device.startswith("cuda")

    torch.manual_seed(0)
    model = memopt.models.build(given.model, tiny=given.tiny).to(given.device, getattr(torch, given.dtype))
    inputs = model.example_inputs(labels=True, **({"batch": 4} if given.tiny else SIZES[given.model]))
    ours = memopt.compile(model, given.budget_bytes)
    steps = {"memopt": stepper(ours, model, inputs, cuda)}
    for _ in range(_WARM):
        steps["memopt"]()
    if cuda:  # both have room beside what the other leaves behind
        torch.cuda.set_per_process_memory_fraction(1.0)
    steps["compile"] = stepper(torch.compile(model), model, inputs, cuda)
    for _ in range(_WARM):
        steps["compile"]()
    seconds: dict[str, list[float]] = {"memopt": [], "compile": []}
    for pair in range(given.pairs):
        for name in ("memopt", "compile") if pair % 2 else ("compile", "memopt"):
            seconds[name].append(steps[name]())
    ratios = [own / peer for own, peer in zip(seconds["memopt"], seconds["compile"], strict=True)]
    low, high = median_range(ratios)
    result = {
        "machine": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "driver": (driver_version() or "not known") if cuda else "",
        "torch": torch.__version__,
        "memopt": memopt.__version__,
        "settings": {key: getattr(given, key) for key in ("model", "tiny", "device", "dtype", "budget_bytes", "pairs")},
        "predicted_bytes": ours.report.peak_bytes,
        "notes": list(ours.report.notes),
        "seconds": seconds,
        "ratio": statistics.median(ratios),
        "ratio_range": [low, high],
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    for name, taken in seconds.items():
        print(f"{name:8} median {1e3 * statistics.median(taken):8.2f} ms, least {1e3 * min(taken):8.2f} ms")
    print(f"memopt / torch.compile, pair by pair: {result['ratio']:.4f} ({low:.4f} to {high:.4f}) of {len(ratios)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
