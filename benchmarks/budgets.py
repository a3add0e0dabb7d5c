"""Every model, tiny, at 90, 80 … 30 % of its plain peak and at its least: what a step took, its time, its gradients.

Operator by operator (`aten`) shares are of eager's peak, as Inductor's code of torch.compile's. Gradients are compared
with float64 on the same weights, so models are without dropout. A process walks the shares of one model and engine
until one is refused, then takes the least that the refusal names, plus 2 %.

python benchmarks/budgets.py --jobs 2 --json benchmarks/results/budgets_cpu.json
python benchmarks/budgets.py --models unet --backends aten
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import memopt
from memopt.comparison.inside import Seat, serve
from memopt.comparison.job import Job, Source
from memopt.comparison.pool import Pool
from memopt.comparison.steps import Engine
from memopt.comparison.truth import Values, errors, step_values, truth
from memopt.comparison.worker import stepper, timed

# The fastest of so many steps: other work on the machine makes some of them slower, and none faster.
REPEATS = 20
PEERS = {"aten": "eager", "inductor": "compile"}


# -- one model on one engine, in a process of its own -----------------------------------------------------------------


def made(name: str, batch: int) -> tuple[Any, Any]:
    model = memopt.models.build(name, tiny=True, dropout=0.0).train()
    return model, model.example_inputs(batch, labels=True)


def work(job: Job, seat: Seat) -> dict[str, Any]:
    model, inputs = job.source.load()
    backend = job.engine
    truth(copy.deepcopy(model), inputs, True)[0].save(job.values)  # out of the memory that is measured

    def run_of(engine: Engine) -> tuple[dict[str, Any], Any]:
        torch._dynamo.reset()
        run = engine.ready(model, True, None)
        error = errors(step_values(run, model, inputs, True), Values.load(job.values))[1]
        found = timed(job, True, stepper(job, run, model, inputs), model)
        model.zero_grad(set_to_none=True)
        row = {"seconds": min(found["seconds"]), "gradient_error": error}
        return {**row, "peak_bytes": found["allocated_bytes"]}, run

    plain, _ = run_of(Engine(PEERS[backend]))
    rows = [{"row": PEERS[backend], **plain}]
    for share in job.more["shares"]:
        rows.append({"row": f"{share:.0%}", **within(run_of, backend, int(share * plain["peak_bytes"]))})
        if "minimum_bytes" in rows[-1]:
            rows.append({"row": "least", **within(run_of, backend, int(rows[-1]["minimum_bytes"] * 1.02))})
            break
    return {"rows": rows}


def within(run_of: Any, backend: str, budget: int) -> dict[str, Any]:
    """A step within a budget and what was predicted of it, or what the minimum is."""
    try:
        row, run = run_of(Engine(backend, f"{budget}B"))
    except memopt.BudgetError as error:  # what its traceback holds goes with it
        return {"budget_bytes": budget, "minimum_bytes": error.minimum_bytes}
    row.update(budget_bytes=budget, predicted_bytes=run.report.peak_bytes, notes=list(run.report.notes))
    chosen = next((point for point in run.report.curve if point.chosen), None)
    return row if chosen is None else {**row, "predicted_extra": chosen.extra}


# -- all of them ------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(memopt.models.names()))
    parser.add_argument("--backends", default="aten,inductor")
    parser.add_argument("--shares", default="0.9,0.8,0.7,0.6,0.5,0.4,0.3", help="falling")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1, help="processes that prepare steps at a time")
    parser.add_argument("--seconds", type=float, help="for everything together")
    parser.add_argument("--json", type=Path, help="written again after every process")
    given = parser.parse_args()

    pairs = [(model, backend) for model in given.models.split(",") for backend in given.backends.split(",")]
    path = tuple(str(Path(entry).resolve()) for entry in (Path(__file__).parent, *sys.path))
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "memopt": memopt.__version__,
        "settings": {"batch": given.batch, "tiny": True, "dropout": 0.0, "jobs": given.jobs, "repeats": REPEATS},
        "rows": [],
    }
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(Path(folder), 3600.0, False, given.jobs, given.seconds)
        pool.add(
            [
                Job(
                    Source("budgets:made", {"name": model, "batch": given.batch}), backend, True, "cpu",
                    warmup=1, repeats=REPEATS, values=f"{folder}/{backend}-{model}.pt", program=(__file__,), path=path,
                    more={"shares": [float(share) for share in given.shares.split(",")]},
                )
                for model, backend in pairs
            ]
        )  # fmt: skip
        for number, said in pool.run():
            model, backend = pairs[number]
            rows = said.get("rows", [{"row": "none", "error": said.get("reason", "")}])
            result["rows"] += [{"model": model, "backend": backend, **row} for row in rows]
            for row in rows:
                print(f"{time.perf_counter() - started:5.0f} s {model:18} {backend:9} {line_of(row)}", flush=True)
            if given.json:
                given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def line_of(row: dict[str, Any]) -> str:
    if "seconds" not in row:
        return f"{row['row']:8} {row.get('error') or 'refused: the minimum is ' + format(row['minimum_bytes'], ',')}"
    used = f"{row['peak_bytes'] / row['budget_bytes']:6.1%}" if "budget_bytes" in row else ""
    extra = f"{row['predicted_extra']:+.1%}" if "predicted_extra" in row else ""
    figures = f"{row['peak_bytes']:12,} B {used:7} {row['seconds'] * 1e3:8.2f} ms {extra:8} {row['gradient_error']:.1e}"
    return f"{row['row']:8} {figures} {' '.join(row.get('notes', ()))[:60]}"


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], work) if sys.argv[1:] and Path(sys.argv[1]).is_file() else main())
