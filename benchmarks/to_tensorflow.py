"""Export every model of memopt.models and many classes of transformers to TensorFlow, and put the outcome on record.

python benchmarks/to_tensorflow.py [NAME …]    writes benchmarks/results/tensorflow_cpu.json; with names only their rows
                                               are made again

Each model becomes a SavedModel in a temporary folder, which TensorFlow runs at several batch sizes: in one process,
to spare starting it twice for each model.
"""

from __future__ import annotations

import importlib
import json
import logging
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from conversions import CLASSES

import memopt
from memopt import models
from memopt.cli.conversion_inputs import derived_inputs
from memopt.tensorflow import export
from memopt.tensorflow.worker import Folder

RESULT = Path(__file__).resolve().parent / "results" / "tensorflow_cpu.json"


def in_this_process(task: str, request: dict[str, Any], folder: Path, **_: Any) -> dict[str, Any]:
    module = importlib.import_module(f"memopt.tensorflow.tasks.{task}")
    found: dict[str, Any] = module.run(json.loads(json.dumps(request)), Folder(folder))
    return found


def built(wanted: list[str]) -> Iterator[tuple[str, str, torch.nn.Module, dict[str, Any]]]:
    for name in models.names():
        if not wanted or name in wanted:
            torch.manual_seed(0)
            model = models.build(name, tiny=True).eval()
            yield "memopt.models", name, model, model.example_inputs(2)
    for kind, name, config, settings in CLASSES:
        if not wanted or name in wanted:
            torch.manual_seed(0)
            made = getattr(transformers, name)(getattr(transformers, config)(**settings)).eval()
            yield kind, name, made, derived_inputs(made)


def row(kind: str, name: str, model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": kind, "model": name}
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            record = memopt.export_tensorflow(model, inputs, Path(folder) / "saved")
    except Exception as error:
        return {**found, "refused": str(error).splitlines()[0][:200]}
    outputs = [output for run in record.runs for output in run.outputs]
    return {
        **found,
        "batches": [run.sizes.get("batch") for run in record.runs],
        "error": max(output.error for output in outputs),
        "torch_error": max((output.torch_error for output in outputs if output.torch_error is not None), default=None),
        "max_relative": max(output.max_relative for output in outputs),
        "compile_seconds": round(record.compile_seconds, 2),
        "memory": dict(record.memory),
        "bytes": record.bytes,
        "notes": list(record.notes),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    export.call = in_this_process
    wanted = sys.argv[1:]
    rows = []
    for item in built(wanted):
        rows.append(row(*item))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if wanted:
        fresh = {made["model"]: made for made in rows}
        rows = [fresh.get(made["model"], made) for made in json.loads(RESULT.read_text())["rows"]]
    libraries = ("torch", "transformers", "tensorflow-cpu", "jax", "torchax")
    result = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in libraries},
        "settings": {"size": "tiny, random weights", "batch": 2},
        "rows": rows,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
