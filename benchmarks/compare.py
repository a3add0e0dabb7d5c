"""Inference of the reference models on every engine, beside eager and torch.compile; each row in a process of its own.

python benchmarks/compare.py --device cuda --dtype float16 --jobs 16 --json out.json
python benchmarks/compare.py --tiny --models resnet50,gpt2 --backends aten,static
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import memopt
from memopt.api import BACKENDS
from memopt.comparison.job import Job, Source
from memopt.comparison.run import Case, compare_cases
from memopt.comparison.steps import Engine

SIZES: dict[str, dict[str, int]] = {
    "resnet50": {"batch": 32},
    "bert_base": {"batch": 8, "sequence": 128},
    "vit_b_16": {"batch": 32},
    "gpt2": {"batch": 8, "sequence": 512},
    "mobilenet_v3_large": {"batch": 32},
    "unet": {"batch": 4, "resolution": 256},
    "densenet121": {"batch": 32},
    "llama_tiny": {"batch": 8, "sequence": 256},
}


def made(name: str, tiny: bool) -> tuple[Any, Any]:
    """The model and its inputs, in the process of a row."""
    model = memopt.models.build(name, tiny=tiny).eval()
    sizes = {} if tiny else {key: value for key, value in SIZES[name].items() if key != "batch"}
    return model, model.example_inputs(2 if tiny else SIZES[name]["batch"], **sizes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--peers", default="eager,compile")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=1, help="rows prepared at the same time")
    parser.add_argument("--together", type=int, default=3, help="models whose rows are prepared together")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for a row")
    parser.add_argument("--json", type=Path, help="written again after every few models")
    given = parser.parse_args()

    engines = tuple(Engine.parse(name) for name in (*given.peers.split(","), *given.backends.split(",")))
    names, started, found = given.models.split(","), time.perf_counter(), []
    for first in range(0, len(names), given.together):
        cases = []
        for name in names[first : first + given.together]:
            source = Source(function="compare:made", arguments={"name": name, "tiny": given.tiny})
            job = Job(source, "", False, given.device, given.dtype, warmup=5, repeats=given.repeats)
            cases.append(Case(name, job, engines, {} if given.tiny else SIZES[name]))
        with tempfile.TemporaryDirectory() as folder:
            made_now = compare_cases(cases, Path(folder), timeout=given.timeout, jobs=given.jobs, keep_caches=False)
        found += [json.loads(comparison.to_json()) for comparison in made_now]
        for comparison in made_now:
            print(comparison, flush=True)
        print(f"{time.perf_counter() - started:.0f} s\n", flush=True)
        if given.json:
            given.json.write_text(json.dumps({"comparisons": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
