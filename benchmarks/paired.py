"""Steps of torch.compile and of memopt in turns: which is faster, where medians of separate runs differ by 1 %.

Rows of benchmarks/training.py are timed one after another, and a clock drifts meanwhile. Here both are compiled in
processes of their own, and then take one step each, now the one first and then the other. The ratio is that of each
pair: its median, and the range in which the median of all such ratios lies with 95 % certainty (order statistics). What
the host takes until all is launched is told beside it.

python benchmarks/paired.py --model gpt2_medium --device cuda --dtype bfloat16 --budget-bytes 18029215744
python benchmarks/paired.py --model gpt2_medium --tiny --pairs 9
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.training import SIZES
from memopt.comparison.pool import ALLOCATOR

_ENGINES = ("compile", "memopt")
_WARM = 8  # steps of each before any counts


def median_range(values: Sequence[float]) -> tuple[float, float]:
    """Values between which the median of what these are drawn from lies with 95 % certainty: by their order alone."""
    ordered = sorted(values)
    half_width = 1.96 * math.sqrt(len(ordered)) / 2
    low = max(0, math.floor(len(ordered) / 2 - half_width))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half_width))
    return ordered[low], ordered[high]


# -- one engine, in a process of its own ------------------------------------------------------------------------------


def worker(given: argparse.Namespace) -> int:
    import torch

    import memopt

    torch.manual_seed(0)
    cuda = given.device.startswith("cuda")
    model = memopt.models.build(given.model, tiny=given.tiny).to(given.device, getattr(torch, given.dtype))
    inputs = model.example_inputs(labels=True, **({"batch": 4} if given.tiny else SIZES[given.model]))
    run: Any = torch.compile(model) if given.worker == "compile" else memopt.compile(model, given.budget_bytes)

    def step() -> tuple[float, float]:
        model.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        run(**inputs).backward()
        launched = time.perf_counter() - began
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began, launched

    for _ in range(_WARM):
        step()
    environment = {
        "torch": torch.__version__,
        "memopt": memopt.__version__,
        "machine": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
    }
    about: dict[str, Any] = {"reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None}
    if given.worker == "memopt":
        about |= {"predicted_bytes": run.report.peak_bytes, "notes": list(run.report.notes)}
    print("READY " + json.dumps([environment, about]), flush=True)
    for _ in sys.stdin:  # a line is one step
        print("STEP " + json.dumps(step()), flush=True)
    return 0


# -- both -------------------------------------------------------------------------------------------------------------


def begun(name: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", name]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR, **os.environ}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def said(process: subprocess.Popen[str], word: str) -> Any:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word + " "):
            return json.loads(line.removeprefix(word))
    raise SystemExit(f"a process ended with {process.wait()}: its own output says why")


def step_of(process: subprocess.Popen[str]) -> tuple[float, float]:
    assert process.stdin is not None
    process.stdin.write("step\n")
    process.stdin.flush()
    seconds, launched = said(process, "STEP")
    return seconds, launched


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2_medium", choices=sorted(SIZES))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--budget-bytes", type=int, help="memopt's; left out: no budget")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=_ENGINES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return worker(given)

    processes = {name: begun(name) for name in _ENGINES}
    ready = {name: said(process, "READY") for name, process in processes.items()}
    environment, about = ready["memopt"][0], {name: found[1] for name, found in ready.items()}
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in _ENGINES}
    for pair in range(given.pairs):
        for name in _ENGINES if pair % 2 else _ENGINES[::-1]:
            steps[name].append(step_of(processes[name]))
    for process in processes.values():
        process.communicate()

    from memopt.comparison.processes import driver_version

    ratios = [own[0] / peer[0] for own, peer in zip(steps["memopt"], steps["compile"], strict=True)]
    low, high = median_range(ratios)
    rows = []
    for name, found in steps.items():
        seconds, launched = ([pair[part] for pair in found] for part in (0, 1))
        row = {"row": name, "seconds": statistics.median(seconds), "fastest_seconds": min(seconds)}
        rows.append({**row, "launched_seconds": statistics.median(launched), **about[name], "steps_seconds": seconds})
    rows[-1] |= {"budget_bytes": given.budget_bytes, "ratio": statistics.median(ratios), "ratio_range": [low, high]}
    sizes = {} if given.tiny else SIZES[given.model]
    result = {
        **environment,
        "driver": (driver_version() or "not known") if given.device.startswith("cuda") else "",
        "settings": {
            "model": given.model, "tiny": given.tiny, "device": given.device, "dtype": given.dtype, **sizes,
            "pairs": given.pairs,
        },
        "rows": rows,
    }  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        times = [f"{1e3 * row[key]:8.2f} ms" for key in ("seconds", "fastest_seconds", "launched_seconds")]
        print(f"{row['row']:8} median {times[0]}, least {times[1]}, launched in {times[2]}")
    print(f"memopt / torch.compile, pair by pair: {rows[-1]['ratio']:.4f} ({low:.4f} to {high:.4f}) of {len(ratios)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
