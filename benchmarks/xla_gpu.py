"""GPT-2 medium and ResNet-50 in bfloat16 on a GPU: inference and one training step, XLA beside Inductor.

    python -m benchmarks.xla_gpu --out results/xla_gpu.json      (--tiny: small models, on any device)

Every row is a process of its own. The device's peak is what PyTorch's allocator and XLA's own held at most, together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import memopt

SIZES: dict[str, dict[str, int]] = {
    "resnet50": {"batch": 64, "resolution": 224},
    "gpt2_medium": {"batch": 8, "sequence": 1024},
}
ENGINES = ("xla", "inductor")


def xla_bytes(device: torch.device) -> int:
    """The most that XLA's allocator held."""
    if "jax" not in sys.modules or device.type != "cuda":
        return 0
    import jax

    return int((jax.devices("cuda")[0].memory_stats() or {}).get("peak_bytes_in_use", 0))


def row(name: str, engine: str, mode: str, tiny: bool) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = memopt.models.build(name, tiny=tiny).to(device, torch.bfloat16)
    inputs = model.example_inputs(**({"batch": 2} if tiny else SIZES[name]), labels=mode == "training")
    inputs = {k: v.to(device).bfloat16() if v.is_floating_point() else v.to(device) for k, v in inputs.items()}
    model.train(mode == "training")
    run: Any = model
    if engine == "inductor":
        run = torch.compile(model)
    elif engine == "xla":
        run = memopt.compile(model, backend="xla", verify=False)

    def step() -> torch.Tensor:
        with torch.set_grad_enabled(mode == "training"):
            result: torch.Tensor = run(**inputs)
        if mode == "training":
            model.zero_grad(set_to_none=True)
            result.backward()
        return result.detach()

    start = time.perf_counter()
    result = step()
    wait(device)
    first = time.perf_counter() - start
    with torch.no_grad():
        expected = model(**inputs)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(3 if tiny else 15):
        wait(device)
        start = time.perf_counter()
        step()
        wait(device)
        times.append(time.perf_counter() - start)
    own = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    other = xla_bytes(device)
    return {
        "model": name, "engine": engine, "mode": mode, "milliseconds": statistics.median(times) * 1e3,
        "first_seconds": first, "torch_bytes": own, "xla_bytes": other, "peak_bytes": own + other,
        "difference": float((result.float() - expected.float()).abs().max()), "scale": float(expected.abs().max()),
    }  # fmt: skip


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row", nargs=3)
    parser.add_argument("--seconds", type=float, default=70.0)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(row(*args.row, args.tiny)))
        return
    rows = []
    for engine in ENGINES:
        for mode in ("inference", "training"):
            for name in SIZES:
                command = [sys.executable, "-m", "benchmarks.xla_gpu", "--row", name, engine, mode]
                command += ["--tiny"] if args.tiny else []
                done = None
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=args.seconds)
                    rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
                except (subprocess.TimeoutExpired, IndexError, json.JSONDecodeError) as error:
                    reason = str(error) if done is None else (done.stderr.strip().splitlines() or [""])[-1]
                    rows.append({"model": name, "engine": engine, "mode": mode, "error": reason[:500]})
                print(json.dumps(rows[-1]), flush=True)
                if args.out:
                    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
                    args.out.write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
