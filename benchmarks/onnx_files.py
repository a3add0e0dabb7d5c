"""ONNX files of one model beside one another: nodes, bytes, memory of a run, latency, error. Every step is a process.

python benchmarks/onnx_files.py --peers VENV/bin/python --json benchmarks/results/onnx_cpu.json
python benchmarks/onnx_files.py --tiny
python benchmarks/onnx_files.py --device cuda --json benchmarks/results/onnx_h100.json

All files have the same varying axes (batch, sequence) and run at batch one with ONNX Runtime's default optimizations.
Engines: `torch` is plain torch.onnx.export; `onnxsim`, `onnxslim` and `optimum` (O2) are given that file, by the Python
of --peers; `onnxruntime` is that file as ONNX Runtime's offline optimizer (extended) saves it; `memopt` is what `memopt
convert` writes with standard operators, `memopt/onnxruntime` with ONNX Runtime's own as well (`-cuda`: those that pay
there).

memory: the most resident bytes of the process while it runs, above those before the file was loaded, with what loading
        took besides given back first: weights and one run. On CUDA: device bytes by the driver, loading included, all
        files of a model in one process.
latency: median of the runs of one process, in seconds that its one thread worked (on CUDA: that passed); the least of
        the rounds, in which engines take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[0] = str(HERE.parent)  # benchmarks as a package; here a file may hide a library of its name

CPU_ENGINES = ("torch", "onnxsim", "onnxslim", "onnxruntime", "optimum", "memopt", "memopt/onnxruntime")
CUDA_ENGINES = (
    "torch", "memopt", "memopt/onnxruntime-cuda", "torch fp16", "memopt fp16", "memopt/onnxruntime-cuda fp16"
)  # fmt: skip
PEERS = ("onnxsim", "onnxslim", "optimum")


def counted(file: Path) -> dict[str, int]:
    """Nodes of all graphs and functions, and bytes of the file and of all that lies beside it."""
    import onnx

    def nodes(graph: Any) -> int:
        inner = (item for node in graph.node for item in node.attribute if item.HasField("g"))
        return len(graph.node) + sum(nodes(item.g) for item in inner)

    model = onnx.load(file, load_external_data=False)
    count = nodes(model.graph) + sum(len(function.node) for function in model.functions)
    beside = [item for item in file.parent.iterdir() if item.suffix != ".json"]
    return {"nodes": count, "file_bytes": sum(item.stat().st_size for item in beside)}


def child(python: str, *arguments: str, limit: float = 1200.0) -> Any:
    """What a process of this script prints last, or why it failed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)
    command = [python, str(HERE / "onnx_files.py"), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {limit:.0f} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"failed": lines[-1][:200] if lines else f"exit code {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def slug(engine: str) -> str:
    return engine.replace("/", "_").replace(" ", "_")


def make_all(names: list[str], engines: tuple[str, ...], options: argparse.Namespace, work: Path) -> dict[Any, Any]:
    """A row for each model and engine, with the file's size or why there is none."""

    def made(name: str, engine: str) -> dict[str, Any]:
        folder = work / name
        folder.mkdir(parents=True, exist_ok=True)
        if engine in PEERS and options.peers is None:
            return {"failed": "no --peers"}
        python = str(options.peers) if engine in PEERS else sys.executable
        more = ["--tiny"] * options.tiny + ["--no-verify"] * (options.device == "cuda")
        answer = child(python, "--make", engine, "--only", name, "--folder", str(folder), *more)
        return answer if "failed" in answer else counted(folder / slug(engine) / "model.onnx")

    rows = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for first in (True, False):  # the others read what `torch` wrote
            wanted = [(name, engine) for name in names for engine in engines if (engine == "torch") is first]
            for (name, engine), found in zip(wanted, pool.map(lambda pair: made(*pair), wanted), strict=True):
                rows[name, engine] = {"model": name, "engine": engine, **found}
    return {(name, engine): rows[name, engine] for name in names for engine in engines}


def measure(name: str, rows: dict[str, dict[str, Any]], options: argparse.Namespace, folder: Path) -> None:
    """Add what running each engine's file takes to its row."""
    from benchmarks.onnx_running import better

    there = [engine for engine, row in rows.items() if "failed" not in row]
    files = {engine: str(folder / slug(engine) / "model.onnx") for engine in there}
    more = ["--folder", str(folder), "--device", options.device, "--repeats", str(options.repeats)]
    more += ["--rounds", str(options.rounds)]
    if options.device == "cuda":
        found = child(sys.executable, "--run", *files.values(), *more)
        answers = found if isinstance(found, list) else [found] * len(there)
        for engine, answer in zip(there, answers, strict=True):
            rows[engine].update(answer)
        return
    for _ in range(options.rounds):
        for engine in there:
            found = child(sys.executable, "--run", files[engine], *more)
            rows[engine] = better(rows[engine], found[0] if isinstance(found, list) else found)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="*", default=(), help="names of models")
    parser.add_argument("--engines", nargs="*", default=(), help="names of engines")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--peers", type=Path, help="a Python that has onnxsim, onnxslim and optimum")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--jobs", type=int, default=1, help="files that are made at a time")
    parser.add_argument("--work", type=Path, help="folder for the files")
    parser.add_argument("--json", type=Path, help="written after each model; its other models' rows are kept")
    parser.add_argument("--make", help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--no-verify", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def versions(peers: Path | None) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json\n"
        "names = ['torch', 'transformers', 'onnx', 'onnxruntime', 'onnxruntime-gpu', 'onnxscript', 'onnxsim', "
        "'onnxslim', 'optimum', 'optimum-onnx']\n"
        "have = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({n: have[n] for n in names if n in have}))"
    )
    found: dict[str, str] = {}
    for python in (peers, sys.executable):
        if python is not None:
            found |= json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():  # of two packages the one that is imported
        found["onnxruntime-gpu"] = onnxruntime.__version__
    return found


def machine(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


def shown(row: dict[str, Any]) -> str:
    figures = [f"{row[key] / 1e6:9.2f}" if key in row else "" for key in ("file_bytes", "peak_bytes")]
    last = row.get("failed") or f"{row['seconds'] * 1e3:9.2f} ms  {row['error']:.0e}"
    return f"{row['model']:20} {row['engine']:24} {row.get('nodes', ''):>6} {' '.join(figures)} {last}"


def main() -> int:
    options = parsed()
    if options.make:
        from benchmarks.onnx_making import make

        make(options.only[0], options.make, options.folder, options.tiny, not options.no_verify)
        return 0
    if options.run:
        from benchmarks.onnx_running import run

        print(json.dumps(run(options.run, options.folder, options.device, options.repeats, options.rounds)))
        return 0
    from benchmarks.onnx_models import NAMES
    from memopt.comparison.processes import driver_version

    result: dict[str, Any] = {
        "machine": machine(options.device),
        "device": options.device,
        **({"driver": driver_version() or "not known"} if options.device == "cuda" else {}),
        "versions": versions(options.peers),
        "settings": {"rounds": options.rounds, "repeats": options.repeats, "threads": 1, "tiny": options.tiny},
        "rows": [],
    }
    if options.json and options.json.exists():
        result["rows"] = json.loads(options.json.read_text())["rows"]
    engines = tuple(options.engines) or (CUDA_ENGINES if options.device == "cuda" else CPU_ENGINES)
    names = list(options.only or NAMES)
    groups = [names] if options.device == "cuda" else [[name] for name in names]  # here the disk is small, there time
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        for group in groups:
            made = make_all(group, engines, options, Path(work))
            for name in group:
                rows = {engine: made[name, engine] for engine in engines}
                measure(name, rows, options, Path(work) / name)
                shutil.rmtree(Path(work) / name)
                kept = [row for row in result["rows"] if row["model"] != name or row["engine"] not in rows]
                result["rows"] = kept + list(rows.values())
                for row in rows.values():
                    print(shown(row), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
