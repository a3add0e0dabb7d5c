"""The most host memory that `memopt convert` holds on a large checkpoint, as a multiple of its weights.

python -m benchmarks.conversion_memory [--gigabytes 3] [--folder PATH]     writes results/memory_conversion.json

A safetensors file of that size, with the module it is for, goes through the command line in a process of its own. The
kernel's own figure for that process is taken (VmHWM: pages of mapped files count too), and once a tenth of a second the
part of it that is no page of a file (RssAnon).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from memopt.convert.onnx_file import external_files, size_of

RESULTS = Path(__file__).resolve().parent / "results" / "memory_conversion.json"
WIDTH = 5000
ALLOWED = 1.5  # times the weights
MODULE = """
import torch
class Deep(torch.nn.Sequential):
    def __init__(self, layers={layers}):
        super().__init__(*(torch.nn.Linear({width}, {width}, bias=False) for _ in range(layers)))
"""


def prepared(folder: Path, layers: int) -> int:
    """Write the module and its checkpoint; return the bytes of the weights."""
    (folder / "deep.py").write_text(MODULE.format(layers=layers, width=WIDTH))
    torch.manual_seed(0)
    weight = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    # Every layer has numbers of its own: nothing can be stored once for all.
    save_file({f"{index}.weight": weight + index * 1e-4 for index in range(layers)}, folder / "deep.safetensors")
    return layers * WIDTH * WIDTH * 4


def status(process: int) -> dict[str, int]:
    """Bytes that the kernel says of a process, by name; empty where it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines)
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def converted(folder: Path) -> dict[str, float]:
    """Convert in a process of its own, and watch it."""
    words = ["convert", "deep.safetensors", "--model", "deep:Deep", "-o", "deep.onnx", "--input", f"input=2x{WIDTH}"]
    code = "import sys; from memopt.cli import main; main(sys.argv[1:])"
    paths = os.pathsep.join(path for path in (os.getcwd(), *sys.path) if path)
    started = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", code, *words], cwd=folder, env={**os.environ, "PYTHONPATH": paths})
    anonymous = total = 0
    while child.poll() is None:
        found = status(child.pid)
        anonymous, total = max(anonymous, found.get("RssAnon", 0)), max(total, found.get("VmHWM", 0))
        time.sleep(0.1)
    if child.returncode:
        sys.exit(f"memopt ended with {child.returncode}")
    return {"peak_bytes": total, "peak_anonymous_bytes": anonymous, "seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument(
        "--folder", type=Path, help="where the files go: three times the weights are needed for a while"
    )
    options = parser.parse_args()
    layers = max(1, round(options.gigabytes * 1e9 / (WIDTH * WIDTH * 4)))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        weights = prepared(folder, layers)
        found = converted(folder)
        files = sorted(external_files(folder / "deep.onnx"))
        row = {
            "weights_bytes": weights,
            **found,
            "peak_over_weights": round(found["peak_bytes"] / weights, 3),
            "anonymous_over_weights": round(found["peak_anonymous_bytes"] / weights, 3),
            "written_bytes": size_of(folder / "deep.onnx"),
            "files_beside": files,
        }
    result = {"machine": platform.machine(), "torch": torch.__version__, "rows": [row]}
    print(json.dumps(result, indent=1))
    if options.gigabytes == 3.0:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    if row["peak_over_weights"] > ALLOWED:
        sys.exit(f"{row['peak_over_weights']} times the weights were held: {ALLOWED} are allowed")


if __name__ == "__main__":
    main()
