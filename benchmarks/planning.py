"""How long planning takes on one core, on joint graphs of real models at full size; nothing is run.

python benchmarks/planning.py --json benchmarks/results/planning_cpu.json
python benchmarks/planning.py --tiny
"""

from __future__ import annotations

import argparse
import json
import platform
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
from memopt.memory.cost.table import CostTable
from memopt.memory.resident import Resident
from memopt.memory.timeline import timeline
from memopt.passes.checkpoint import workspace
from memopt.program import Program
from memopt.step.planner import plan_step

MODELS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("resnet50", {}, {"batch": 64}),
    ("densenet161", {}, {"batch": 32}),
    ("gpt2_medium", {}, {"batch": 16, "sequence": 1024}),
    ("gpt2_medium", {"layers": 48}, {"batch": 8, "sequence": 1024}),
    ("llama_1b", {}, {"batch": 4, "sequence": 2048}),
)


def joint_graphs(tiny: bool) -> Iterator[tuple[str, Program]]:
    """Capture each model's joint graph on fake tensors."""
    for name, overrides, sizes in MODELS:
        if tiny:
            model = memopt.models.build(name, tiny=True)
            inputs = model.example_inputs(2, labels=True)
        else:
            model = memopt.models.build(name, **overrides)
            inputs = model.example_inputs(labels=True, **sizes)
        options = make_options(backend="aten", device=torch.device("cpu"))
        session = Session(
            budget=None,
            backend=options.engine,
            passes=None,
            verify=False,
            names={},
            resident=Resident(),
            table=CostTable(),
        )
        label = name + "".join(f", {value} {key}" for key, value in overrides.items())
        (program,) = collect(model, (), inputs, session)
        yield label, program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--budget", type=float, default=0.6, help="share of the unconstrained peak of activations")
    parser.add_argument("--seconds", type=float, default=10.0, help="limit of the search")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, program in joint_graphs(given.tiny):
        costs = CostTable(limit_bytes=0).measure_all(program)  # estimates: no operator of this size is run here
        plain = timeline(program, workspace(program, costs)).peak_bytes
        started = time.perf_counter()
        step = plan_step(
            [program],
            [costs],
            int(plain * given.budget),
            lambda planned, costs=costs: (planned, timeline(planned, workspace(planned, costs))),
            seconds=given.seconds,
        )
        seconds = time.perf_counter() - started
        plan = step.choices[0].plan
        base = step.choices[0].lowering.problem.base_seconds
        rows.append(
            {
                "graph": name,
                "nodes": len(program.graph.nodes),
                "operations": len(step.choices[0].lowering.operations),
                "seconds": seconds,
                "unconstrained_bytes": plain,
                "minimum_bytes": step.minimum_bytes,
                "minimum_share": step.minimum_bytes / plain,
                "peak_share": step.peak_bytes / plain,
                "extra_share": plan.extra_seconds / base if base else 0.0,
                "feasible": step.feasible,
            }
        )
        row = rows[-1]
        print(
            f"{name:28} {row['nodes']:6} nodes {row['operations']:6} operations  planned in {seconds:6.1f} s  "
            f"peak {row['peak_share']:.0%} for +{row['extra_share']:.1%} time, least {row['minimum_share']:.0%}",
            flush=True,
        )
    result = {
        "machine": platform.processor() or platform.machine(),
        "threads": 1,
        "torch": torch.__version__,
        "memopt": memopt.__version__,
        "settings": {"budget": given.budget, "search_seconds": given.seconds},
        "rows": rows,
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
