"""Models on every engine, beside eager, checkpointed blocks and torch.compile; each row in a process of its own.

Rows are prepared side by side (--jobs) in the order of the cases, and timed one at a time while the others are stopped.
The file is written after every row; what has not ended after --seconds is a row that says so. Models are made without
dropout: engines may draw other random numbers, and without any every row's error is that of the step that is timed.

python benchmarks/compare.py --device cuda --dtype float16 --training-dtype bfloat16 --jobs 16 --json out.json
python benchmarks/compare.py --tiny --cases inference:gpt2,training:unet --rows eager,aten --training-rows eager,aten
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from building import built

from memopt.backends.by_name import BACKENDS
from memopt.comparison.job import Job, Source
from memopt.comparison.progress import Case
from memopt.comparison.record import Comparison
from memopt.comparison.run import compare_cases
from memopt.comparison.steps import Engine

SIZES: dict[str, dict[str, dict[str, int]]] = {
    "training": {
        "gpt2_medium": {"batch": 16, "sequence": 1024},
        "llama_1b": {"batch": 4, "sequence": 2048},
        "unet": {"batch": 8, "resolution": 512},
        "resnet152": {"batch": 128, "resolution": 224},
        "bert_large": {"batch": 32, "sequence": 512},
        "densenet161": {"batch": 96, "resolution": 224},
    },
    "inference": {
        "resnet50": {"batch": 32, "resolution": 224},
        "bert_base": {"batch": 8, "sequence": 128},
        "gpt2": {"batch": 4, "sequence": 512},
        "vit_b_16": {"batch": 32, "resolution": 224},
        "unet": {"batch": 8, "resolution": 256},
        "densenet121": {"batch": 32, "resolution": 224},
        "mobilenet_v3_large": {"batch": 32, "resolution": 224},
        "llama_tiny": {"batch": 8, "sequence": 256},
    },
}
CASES = ",".join(f"{mode}:{name}" for mode, sizes in SIZES.items() for name in sizes)
ROWS = ",".join(("eager", "compile", *(name for name in BACKENDS if name != "tensorflow")))
TRAINING_ROWS = "eager,checkpoint,compile,compile:0.5,inductor:60%,aten:60%,xla:60%"


def made(name: str, mode: str, tiny: bool, device: str, dtype: str) -> tuple[Any, Any]:
    """The model and its inputs, in the process of a row.

    Large models to be trained are made where and as they are used. Batch norms of models that infer
    have seen images, or the values of half precision would run out of its range.
    """
    training = mode == "training"
    sizes = {"batch": 2} if tiny else dict(SIZES[mode][name])
    place = (device, dtype) if training else ("cpu", "float32")
    model = built(name, *place, tiny=tiny, dropout=0.0).train(training)
    if not training:
        show_images(model)
    return model, model.example_inputs(sizes.pop("batch"), labels=training, **sizes)


def show_images(model: torch.nn.Module) -> None:
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    if norms:
        for norm in norms:
            norm.train().momentum = 1.0
        with torch.no_grad():
            model(**model.example_inputs(8, resolution=64))
        model.eval()


def case_of(given: argparse.Namespace, text: str) -> Case:
    mode, _, name = text.partition(":")
    training = mode == "training"
    dtype = given.training_dtype if training else given.dtype
    words = {"name": name, "mode": mode, "tiny": given.tiny, "device": given.device, "dtype": dtype}
    job = Job(
        Source(function="compare:made", arguments=words),
        "",
        training,
        given.device,
        dtype,
        warmup=2 if training else 5,
        repeats=given.training_repeats if training else given.repeats,
    )
    rows = given.training_rows if training else given.rows
    sizes: dict[str, Any] = {"batch": 2} if given.tiny else dict(SIZES[mode][name])
    return Case(name, job, tuple(map(Engine.parse, rows.split(","))), {**sizes, "dropout": 0.0, "tiny": given.tiny})


class Watch:
    """Writes the file after every row, and a line for each."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.started, self.printed = path, time.perf_counter(), set[tuple[str, ...]]()

    def __call__(self, found: list[Comparison]) -> None:
        if self.path:
            content = {"comparisons": [json.loads(item.to_json()) for item in found]}
            self.path.write_text(json.dumps(content, indent=1) + "\n")
        for item in found:
            for row in item.rows:
                key = item.mode, item.model, row.name
                if key not in self.printed:
                    self.printed.add(key)
                    figures = f"{(row.median or 0) * 1e3:9.2f} ms {(row.allocated_bytes or 0) / 1e6:9,.0f} MB"
                    seconds = f"{time.perf_counter() - self.started:4.0f} s"
                    print(f"{seconds} {item.mode:9} {item.model:12} {row.name:13} {row.reason or figures}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES, help="mode:model, in the order in which they are begun")
    parser.add_argument("--rows", default=ROWS, help="of inference")
    parser.add_argument("--training-rows", default=TRAINING_ROWS, help="shares are of eager's peak")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="of inference")
    parser.add_argument("--training-dtype", default="float32")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=30, help="steps of inference that are timed")
    parser.add_argument("--training-repeats", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=1, help="rows prepared at the same time")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a row")
    parser.add_argument("--seconds", type=float, help="for everything together")
    parser.add_argument("--json", type=Path, help="written again after every row")
    given = parser.parse_args()

    cases, watch = [case_of(given, text) for text in given.cases.split(",")], Watch(given.json)
    limits = {"timeout": given.timeout, "jobs": given.jobs, "seconds": given.seconds}
    with tempfile.TemporaryDirectory() as folder:
        found = compare_cases(cases, Path(folder), keep_caches=False, watch=watch, **limits)
    print(f"{time.perf_counter() - watch.started:.0f} s\n", flush=True)
    for comparison in found:
        print(comparison, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
