"""Where XLA's time goes: a model's calls on a GPU, by kernel, and what the host takes for one.

    python -m benchmarks.xla_kernels gpt2_medium training --layers 4
    python -m benchmarks.xla_kernels --tiny resnet50 training

Prints the median time of a call, what the host takes until it has queued one, how long some kernel runs, and the
kernels by time. With `--turn FOLDER` a process says there that it has compiled, and waits until a file `go` is
made; from then on such processes take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import fcntl
import json
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import memopt
from benchmarks.kernels import profiled
from benchmarks.xla_gpu import SIZES


@contextlib.contextmanager
def turn(path: Path | None) -> Iterator[None]:
    """Wait until all may begin, and no other process is inside."""
    if path is None:
        yield
        return
    (path / f"ready.{os.getpid()}").touch()
    while not (path / "go").exists():
        time.sleep(0.1)
    with (path / "turn").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def made(given: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """The call that is looked at; it waits for nothing."""
    trains = given.mode == "training"
    options = {"layers": given.layers} if given.layers else {}
    options |= {"vocabulary": given.vocabulary} if given.vocabulary else {}
    torch.manual_seed(0)
    model = memopt.models.build(given.model, tiny=given.tiny, dropout=given.dropout, **options)
    model = model.to(device, torch.bfloat16).train(trains)
    sizes = {"batch": 2} if given.tiny else SIZES[given.model]
    inputs = {
        key: value.to(device, torch.bfloat16) if value.is_floating_point() else value.to(device)
        for key, value in model.example_inputs(**sizes, labels=trains).items()
    }
    run: Any = {
        "xla": lambda: memopt.compile(model, backend="xla", verify=False),
        "compile": lambda: torch.compile(model),
        "eager": lambda: model,
    }[given.engine]()

    # What passes through hooks is exchanged as tensors; otherwise forward's arrays go to backward as they are.
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value)

    def call() -> None:
        model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(trains), hooks if given.exchange else contextlib.nullcontext():
            result = run(**inputs)
        if trains:
            result.backward()

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SIZES)
    parser.add_argument("mode", choices=("inference", "training"))
    parser.add_argument("--engine", default="xla", choices=("xla", "compile", "eager"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--exchange", action="store_true", help="give what is saved for backward to PyTorch")
    parser.add_argument("--label", default="")
    parser.add_argument("--turn", type=Path)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--out", type=Path, help="a line of JSON is added to it")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    call = made(given, device)
    start = time.perf_counter()
    call()
    wait()
    first = time.perf_counter() - start
    with turn(given.turn):
        found: dict[str, list[float]] = {"seconds": [], "host": []}
        for number in range(given.calls + 2):
            start = time.perf_counter()
            call()
            queued = time.perf_counter()
            wait()
            if number >= 2:
                found["host"].append(queued - start)
                found["seconds"].append(time.perf_counter() - start)
        times = {name: statistics.median(values) for name, values in found.items()}
        kernels = profiled(lambda: (call(), wait(), None)[-1], device.type)
        host = cProfile.Profile()
        host.runcall(lambda: [call() for _ in range(3)])
        wait()
        say(given, {"first": first, **times, **kernels}, host)


def say(given: argparse.Namespace, row: dict[str, Any], host: cProfile.Profile) -> None:
    """One table on stdout."""
    name = f"{given.model} {given.mode} {given.engine} {given.label}".strip()
    print(
        f"== {name}: {row['seconds'] * 1e3:.2f} ms, host {row['host'] * 1e3:.2f}, kernels {row['busy'] * 1e3:.2f},"
        f" gaps {row['gaps'] * 1e3:.2f}, first call {row['first']:.1f} s"
    )
    for kernel, count, seconds in row["kernels"][:16]:
        print(f"   {seconds * 1e3:8.3f} ms {count:5d} x {kernel[:110]}")
    stats: Any = pstats.Stats(host)
    by_own = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:14]
    for (file, line, function), (calls, _, own, total, _) in by_own:
        times = f"{own / 3 * 1e3:8.3f} own {total / 3 * 1e3:8.3f} all, {calls // 3:5d} x"
        print(f"   host {times} {Path(file).name}:{line} {function[:70]}")
    sys.stdout.flush()
    if given.out:
        with given.out.open("a") as file:
            file.write(json.dumps({"row": name, **row, "kernels": row["kernels"][:40]}) + "\n")


if __name__ == "__main__":
    main()
