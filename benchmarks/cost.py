"""Predicted against measured time of a training step, without a plan: what the costs of operators are worth.

python benchmarks/cost.py --tiny
python benchmarks/cost.py --models resnet50 gpt2 --device cuda --dtype bfloat16 --batch 16 --target h100 --json out.json

"measured costs" adds up what each operator took by itself on this device, as the planner does; "roofline" is what is
planned with where nothing can be run (--target: with that device's figures, else with those measured here).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import memopt
from memopt.api import make_options
from memopt.calls.tracing import collect
from memopt.compilation.session import Session
from memopt.memory.cost.devices import find
from memopt.memory.cost.key import processor_name
from memopt.memory.cost.roofline import seconds as roofline_seconds
from memopt.memory.cost.table import CostTable
from memopt.memory.resident import Resident
from memopt.pass_manager import Pass, PassManager
from memopt.passes.checkpoint import Checkpoint
from memopt.program import Program

MODELS = (
    "resnet18", "resnet50", "mobilenet_v3_large", "densenet121", "unet", "vit_b_16", "bert_base", "gpt2", "llama_tiny"
)  # fmt: skip


def passes() -> tuple[Pass, ...]:
    """The training passes without a plan: nothing is recomputed."""
    return tuple(item for item in memopt.TRAINING if not isinstance(item, Checkpoint))


def joint_graphs(model: torch.nn.Module, inputs: dict[str, Any], table: CostTable) -> Iterator[Program]:
    """The model's training programs as they run, after the passes."""
    device = next(model.parameters()).device
    session = Session(
        budget=None,
        backend=make_options(backend="aten", device=device).engine,
        passes=None,
        verify=False,
        names={},
        resident=Resident(),
        table=table,
    )
    for program in collect(model, (), inputs, session):
        yield PassManager(passes(), False).run(program)[0]


def step_seconds(model: torch.nn.Module, inputs: dict[str, Any], backend: str, repeats: int) -> float:
    """The median time of forward and backward."""
    cuda = next(model.parameters()).is_cuda
    run = memopt.compile(model, backend=backend, passes=passes(), verify=False)
    samples = []
    for number in range(repeats + 2):
        model.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        run(**inputs).backward()
        if cuda:
            torch.cuda.synchronize()
        if number >= 2:
            samples.append(time.perf_counter() - began)
    model.zero_grad()
    return statistics.median(samples)


def row(name: str, given: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = memopt.models.build(name, tiny=given.tiny).to(given.device, getattr(torch, given.dtype))
    inputs = model.example_inputs(given.batch, labels=True)
    table = CostTable()
    programs = list(joint_graphs(model, inputs, table))
    began = time.perf_counter()
    costs = [table.measure_all(program) for program in programs]
    looked_up = time.perf_counter() - began
    target = None if given.target is None else find(given.target)
    roofline = 0.0
    for program in programs:
        roofline += sum(roofline_seconds(node, target or table.device(node)) for node in program.calls)
    return {
        "model": name,
        "operators": sum(len(program.calls) for program in programs),
        "cost_seconds": looked_up,
        "predicted_seconds": sum(cost.seconds for found in costs for cost in found.values()),
        "measured_share": _share_timed(costs),
        "roofline_seconds": roofline,
        "measured_seconds": step_seconds(model, inputs, given.backend, given.repeats),
    }


def _share_timed(costs: list[Any]) -> float:
    every = [cost for found in costs for cost in found.values()]
    total = sum(cost.seconds for cost in every)
    return sum(cost.seconds for cost in every if cost.timed) / total if total else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=memopt.models.names(), metavar="MODEL")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="aten")
    parser.add_argument("--target", help="figures for the roofline column: h100, a100, …")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()

    machine = torch.cuda.get_device_name() if given.device.startswith("cuda") else processor_name()
    print(f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__}, {given.dtype}, {given.backend}")
    print(
        f"{'model':20} {'operators':>9} {'found in':>9} {'predicted':>10} {'roofline':>10} {'measured':>10}  p/m   r/m"
    )
    rows = []
    for name in given.models:
        found = row(name, given)
        rows.append(found)
        predicted, roofline, real = (found[f"{kind}_seconds"] for kind in ("predicted", "roofline", "measured"))
        print(
            f"{name:20} {found['operators']:9} {found['cost_seconds']:7.2f} s {predicted * 1e3:7.2f} ms "
            f"{roofline * 1e3:7.2f} ms {real * 1e3:7.2f} ms {predicted / real:5.2f} {roofline / real:5.2f}",
            flush=True,
        )
    result = {
        "machine": machine,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "memopt": memopt.__version__,
        "settings": {key: str(value) for key, value in vars(given).items() if key != "json"},
        "rows": rows,
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
