"""Train sixty classes of transformers and ten plain models within 0.7 of their peak, and infer with them, beside eager.

python -m benchmarks.model_classes [NAME …] [--engine aten|inductor] [--jobs J] [--timeout S] [--json FILE] [--brief]

Each class runs in a process of its own: three steps of AdamW, losses and parameters compared with eager's (in float64
where the model computes in it), the last two steps measured against the budget; then a call without gradients. Where
0.7 is refused, the least that the refusal names is used. Writes benchmarks/results/classes_ENGINE.json and .md (with
names only their rows are made again) and ends with 1 where a class failed: wrong numbers, an internal error, more bytes
than the budget, or no end within the time. --brief searches plans as the tests do: sooner, and less well.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import copy
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.render_classes import classes_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SHARE, STEPS = 0.7, 3
# How far a value may be from float64's: times eager's own distance, times the largest value, and at least.
NOISE, SCALE, LEAST = 8.0, 2e-5, 1e-6


class Wrong(Exception):
    """A class failed; the message says how."""


def every_name() -> list[str]:
    from benchmarks import model_class_list, plain_models

    return [*model_class_list.names(), *plain_models.names()]


def build(name: str) -> tuple[Any, dict[str, Any]]:
    from benchmarks import model_class_list, plain_models

    room = plain_models if name in plain_models.MODELS else model_class_list
    return room.build(name)


def kind_of(name: str) -> str:
    from benchmarks import model_class_list

    return next((kind for kind, other, _ in model_class_list.CLASSES if other == name), "plain")


# -- one class, in a process of its own -----------------------------------------------------------------------------


def floats(out: Any) -> list[Any]:
    """The floating-point tensors of what a model returns, in order."""
    import torch
    from torch.utils import _pytree as pytree

    parts = dict(out) if hasattr(out, "items") else out
    leaves = pytree.tree_leaves(parts)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def loss_of(out: Any) -> Any:
    """The model's own loss, or the mean squares of what it returns."""
    first = (out.get("loss") if hasattr(out, "get") else None) if not isinstance(out, tuple) else out[0]
    if first is not None and first.dim() == 0:
        return first
    return sum(value.square().mean() for value in floats(out) if value.requires_grad)


class Training:
    """Steps of AdamW with a model, or with its stand-in."""

    def __init__(self, model: Any, inputs: dict[str, Any]) -> None:
        import torch

        self.model, self.inputs, self.call = model, inputs, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
        self.losses: list[Any] = []

    def step(self, seed: int) -> None:
        import numpy
        import torch

        torch.manual_seed(seed)
        numpy.random.seed(seed)  # models of speech choose by it what they mask
        loss = loss_of(self.call(**self.inputs))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def tensors(self) -> list[Any]:
        """All that a step changes, on a CPU."""
        state = [leaf for each in self.optimizer.state.values() for leaf in each.values()]
        return [*self.model.parameters(), *self.model.buffers(), *state]

    def run(self) -> list[Any]:
        """Losses of all steps, then the parameters and buffers."""
        for seed in range(STEPS):
            self.step(seed)
        return self.results()

    def results(self) -> list[Any]:
        return [*self.losses, *(t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers()))]

    def resident_bytes(self) -> int:
        import torch
        from torch.utils import _pytree as pytree

        state = pytree.tree_leaves([dict(self.optimizer.state), self.inputs])
        tensors = [*self.model.parameters(), *self.model.buffers(), *state]
        storages = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def in_double(inputs: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def exact(what: Callable[[Any, dict[str, Any]], list[Any]], model: Any, inputs: dict[str, Any]) -> list[Any] | None:
    """The same in float64; None where the model does not compute in it."""
    try:
        return what(copy.deepcopy(model).double(), in_double(inputs))
    except (RuntimeError, TypeError, ValueError):
        return None


def compare(found: list[Any], eager: list[Any], true: list[Any] | None, names: list[str]) -> None:
    import torch

    if len(found) != len(eager):
        raise Wrong(f"{len(found)} values, in eager {len(eager)}")
    for i, (new, old) in enumerate(zip(found, eager, strict=True)):
        if torch.equal(new, old):
            continue
        name = names[i] if i < len(names) else f"value {i}"
        if new.shape != old.shape or not new.is_floating_point():
            raise Wrong(f"{name} is another than eager's")
        reference = (old if true is None else true[i]).double()
        noise, error = (old.double() - reference).abs().max(), (new.double() - reference).abs().max()
        # Where the model draws other numbers in float64 the noise is large: eager is then what it is compared with.
        if noise > 1e-3 * reference.abs().max() + LEAST:
            reference, noise = old.double(), torch.zeros(())
            error = (new.double() - reference).abs().max()
        if not error <= NOISE * noise + SCALE * reference.abs().max() + LEAST:
            raise Wrong(f"{name} is off by {error:.2g}, eager by {noise:.2g}, of at most {reference.abs().max():.2g}")


def train(name: str, engine: str, row: dict[str, Any]) -> None:
    from memopt.budget import BudgetError

    # A budget in bytes is of the process's other tensors, too: what is compared lies aside in arrays.
    eager, true = (None if values is None else [v.numpy().copy() for v in values] for values in eagerly(name))
    gc.collect()  # optimizers hold themselves
    trained, least = None, 0
    try:
        trained = within(SHARE, engine, name, row)
    except BudgetError as error:
        if not error.minimum_bytes:
            raise
        least = int(error.minimum_bytes)
    if trained is None:  # out here, where the error holds what was refused no more
        gc.collect()
        trained = within(least, engine, name, row)
    names = [f"loss {i}" for i in range(STEPS)] + [
        key for key, _ in (*trained.model.named_parameters(), *trained.model.named_buffers())
    ]
    compare(trained.results(), tensors(eager), tensors(true), names)
    if row["measured_bytes"] > row["budget_bytes"]:
        raise Wrong(f"{row['measured_bytes']:,} bytes were held, of a budget of {row['budget_bytes']:,}")


def trainable(name: str) -> tuple[Any, dict[str, Any]]:
    """The model to be trained, the same each time, and its inputs."""
    model, inputs = build(name)
    return model.train(), inputs


def eagerly(name: str) -> tuple[list[Any], list[Any] | None]:
    """What eager steps end with, and the same in float64."""
    true = exact(lambda m, i: Training(m, i).run(), *trainable(name))
    return Training(*trainable(name)).run(), true


def tensors(arrays: list[Any] | None) -> Any:
    """The tensors of arrays; None for none."""
    import torch

    return None if arrays is None else [torch.from_numpy(array) for array in arrays]


def within(budget: Any, engine: str, name: str, row: dict[str, Any]) -> Training:
    """Three steps within a budget, of which the last two are measured."""
    import torch

    import memopt

    torch._dynamo.reset()
    trained = Training(*trainable(name))
    trained.call = memopt.compile(trained.model, budget, optimizer=trained.optimizer, backend=engine)
    trained.step(0)
    # Nothing can be planned while it is measured: models that draw their shapes take the same steps before.
    # What they begin with lies aside in arrays.
    start = [(each, each.detach().numpy().copy()) for each in trained.tensors()]
    for seed in range(1, STEPS):
        trained.step(seed)
    for each, value in start:
        each.detach().numpy()[...] = value
    del start
    del trained.losses[1:]
    measured = 0
    for seed in range(1, STEPS):
        held = trained.resident_bytes()
        measured = max(measured, held + memopt.measure(trained.step, seed).peak_bytes)
    report = trained.call.report
    row |= {
        "budget_bytes": report.budget_bytes,
        "unconstrained_bytes": report.unconstrained_bytes,
        "measured_bytes": measured,
        "graphs": len(report.programs),
        "notes": list(report.notes),
    }
    return trained


def infer(name: str, engine: str) -> None:
    import torch

    import memopt

    model, inputs = build(name)
    model.eval()

    def called(call: Any, given: dict[str, Any]) -> list[Any]:
        torch.manual_seed(0)
        with torch.no_grad():
            return floats(call(**given))

    eager = called(model, inputs)
    true = exact(called, model, inputs)
    torch._dynamo.reset()
    compiled = memopt.compile(model, backend=engine)
    for _ in range(2):
        compare(called(compiled, inputs), eager, true, [f"output {i}" for i in range(len(eager))])


def outcome(what: Callable[[], None]) -> tuple[str, str]:
    """ok, refused or failed, and why."""
    from memopt.budget import BudgetError
    from memopt.capture.export import CaptureError
    from memopt.memory.allocator_events import MeasuringError
    from memopt.pass_manager import PassError

    try:
        what()
    except Wrong as wrong:
        return "failed", str(wrong)
    except (BudgetError, CaptureError, PassError, MeasuringError) as error:
        line = str(error)
        return ("refused" if len(line.splitlines()) == 1 else "failed"), f"{type(error).__name__}: {line}"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).splitlines() or [""])[0]
        return "failed", f"{type(error).__name__}: {text} ({Path(place.filename).name}, line {place.lineno})"
    return "ok", ""


def one(name: str, engine: str) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    started = time.perf_counter()
    row: dict[str, Any] = {"model": name, "kind": kind_of(name), "engine": engine}
    row["training"], row["training_why"] = outcome(lambda: train(name, engine, row))
    row["inference"], row["inference_why"] = outcome(lambda: infer(name, engine))
    return row | {"seconds": round(time.perf_counter() - started, 1)}


# -- all of them ------------------------------------------------------------------------------------------------------


def apart(name: str, engine: str, timeout: float, brief: bool) -> dict[str, Any]:
    """The row of a class, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "row.json")
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.model_classes", name, "--engine", engine]
        caches = {"MEMOPT_CACHE_DIR": f"{folder}/m", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/i"}
        environment = {**os.environ, **caches, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        if brief:
            path = os.pathsep.join([str(ROOT / "tests" / "started"), os.environ.get("PYTHONPATH", "")])
            environment |= {"BRIEF_SEARCHES": "100000,4", "PYTHONPATH": path}
        failed = {"model": name, "kind": kind_of(name), "engine": engine, "inference": "failed", "inference_why": ""}
        try:
            done = subprocess.run(
                [*command, "--one", str(answer)], cwd=ROOT, env=environment, timeout=timeout, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {**failed, "training": "failed", "training_why": f"no end within {timeout:g} s", "seconds": timeout}
        if answer.exists():
            return json.loads(answer.read_text())
        last = (done.stdout.strip().splitlines() or ["nothing was printed"])[-1]
        return {**failed, "training": "failed", "training_why": f"the process ended: {last[:300]}", "seconds": 0.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--engine", default="aten")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one class")
    parser.add_argument("--json")
    parser.add_argument("--brief", action="store_true", help="brief searches for plans")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        Path(args.one).write_text(json.dumps(one(args.names[0], args.engine)))
        return 0
    import torch
    import transformers

    path = Path(args.json) if args.json else RESULTS / f"classes_{args.engine}.json"
    names = args.names or every_name()
    order = every_name()
    rows: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "engine": args.engine,
        "share": SHARE,
    }
    if args.names and path.exists():
        rows = {row["model"]: row for row in json.loads(path.read_text())["rows"]}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        asked = [pool.submit(apart, name, args.engine, args.timeout, args.brief) for name in names]
        for count, done in enumerate(concurrent.futures.as_completed(asked), 1):
            row = done.result()
            rows[row["model"]] = row
            line = f"{count}/{len(names)} {row['model']}: {row['training']} {row['training_why']}"
            print(f"{line}; inference {row['inference']} {row['inference_why']}", file=sys.stderr, flush=True)
            ordered = sorted(rows.values(), key=lambda row: order.index(row["model"]))
            result |= {"rows": ordered}
            path.write_text(json.dumps(result, indent=1) + "\n")  # each time: a run may be stopped
            path.with_suffix(".md").write_text(classes_table(result))
    print(classes_table(result), end="")
    failed = [row["model"] for row in ordered if "failed" in (row["training"], row["inference"])]
    if failed:
        print(f"{len(failed)} classes failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
