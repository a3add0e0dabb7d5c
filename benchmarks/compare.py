"""Models on every engine, beside eager, checkpointed blocks and torch.compile; each row in a process of its own.

Rows are prepared side by side (--jobs) in the order of the models, and timed one at a time while the others are
stopped. The file is written after every row; what has not ended after --seconds is a row that says so.

python benchmarks/compare.py --device cuda --dtype float16 --jobs 16 --json out.json
python benchmarks/compare.py --train --device cuda --dtype bfloat16 --jobs 14 --json out.json
python benchmarks/compare.py --tiny --models resnet50,gpt2 --rows eager,aten,static
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import memopt
from memopt.api import BACKENDS
from memopt.comparison.job import Job, Source
from memopt.comparison.progress import Case
from memopt.comparison.record import Comparison
from memopt.comparison.run import compare_cases
from memopt.comparison.steps import Engine

INFERENCE: dict[str, dict[str, int]] = {
    "resnet50": {"batch": 32},
    "bert_base": {"batch": 8, "sequence": 128},
    "gpt2": {"batch": 8, "sequence": 512},
    "vit_b_16": {"batch": 32},
    "mobilenet_v3_large": {"batch": 32},
    "unet": {"batch": 4, "resolution": 256},
    "densenet121": {"batch": 32},
    "llama_tiny": {"batch": 8, "sequence": 256},
}
TRAINING: dict[str, dict[str, int]] = {
    "gpt2_medium": {"batch": 16, "sequence": 1024},
    "llama_1b": {"batch": 4, "sequence": 2048},
    "unet": {"batch": 8, "resolution": 512},
    "resnet152": {"batch": 128},
    "bert_large": {"batch": 32, "sequence": 512},
    "densenet161": {"batch": 96},
}
INFERENCE_ROWS = ("eager", "compile", *(name for name in BACKENDS if name != "tensorflow"))
TRAINING_ROWS = ("eager", "checkpoint", "compile", "compile:0.5", "inductor:60%", "aten:60%", "xla:60%")


def made(name: str, tiny: bool, train: bool, device: str, dtype: str) -> tuple[Any, Any]:
    """The model and its inputs, in the process of a row: made where and as they are used, the quickest way."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = memopt.models.build(name, tiny=tiny).train(train)
    finally:
        torch.set_default_dtype(usual)
    sizes = dict((TRAINING if train else INFERENCE)[name])
    batch = sizes.pop("batch")
    return model, model.example_inputs(2 if tiny else batch, labels=train, **({} if tiny else sizes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--models", help="default: all")
    parser.add_argument("--rows", help="engines and peers; in training shares of eager's peak: inductor:60%%")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, help="default: 30, in training 10")
    parser.add_argument("--jobs", type=int, default=1, help="rows prepared at the same time")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for a row")
    parser.add_argument("--seconds", type=float, help="for everything together")
    parser.add_argument("--json", type=Path, help="written again after every row")
    given = parser.parse_args()

    sizes = TRAINING if given.train else INFERENCE
    rows = given.rows.split(",") if given.rows else TRAINING_ROWS if given.train else INFERENCE_ROWS
    engines = tuple(Engine.parse(name) for name in rows)
    cases = []
    for name in given.models.split(",") if given.models else sizes:
        words = {key: getattr(given, key) for key in ("tiny", "train", "device", "dtype")}
        source = Source(function="compare:made", arguments={"name": name, **words})
        repeats = given.repeats or (10 if given.train else 30)
        job = Job(source, "", given.train, given.device, given.dtype, warmup=3, repeats=repeats)
        cases.append(Case(name, job, engines, {} if given.tiny else sizes[name]))
    started, printed = time.perf_counter(), set()

    def watch(found: list[Comparison]) -> None:
        if given.json:
            content = {"comparisons": [json.loads(item.to_json()) for item in found]}
            given.json.write_text(json.dumps(content, indent=1) + "\n")
        for item in found:
            for row in item.rows:
                if (item.model, row.name) not in printed:
                    printed.add((item.model, row.name))
                    figure = f"{(row.median or 0) * 1e3:.2f} ms, {(row.allocated_bytes or 0) / 1e6:,.0f} MB"
                    seconds = time.perf_counter() - started
                    print(f"{seconds:5.0f} s {item.model:18} {row.name:13} {row.reason or figure}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        found = compare_cases(
            cases,
            Path(folder),
            timeout=given.timeout,
            jobs=given.jobs,
            keep_caches=False,
            seconds=given.seconds,
            watch=watch,
        )
    print(f"{time.perf_counter() - started:.0f} s\n", flush=True)
    for comparison in found:
        print(comparison, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
