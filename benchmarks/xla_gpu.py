"""GPT-2 medium and ResNet-50 in bfloat16 on a GPU: inference and one training step, XLA beside Inductor.

    python -m benchmarks.xla_gpu --out benchmarks/results/xlagpu_h100.json
    python -m benchmarks.xla_gpu --tiny            small models, on any device

Every row is a process of its own with an empty compile cache: "xla" is memopt's engine of that name, "memopt" its
default one, "inductor" torch.compile. The rows of XLA are compiled one after another (--jobs: so many at a time) and
timed at once, while the others compile beside them; whenever a row is timed, all others are stopped. A training step
is forward and backward, without dropout; the optimizer would be PyTorch's own in every row.

Columns: median time of a call, the device waited for; the most that PyTorch's allocator and XLA's held, added up
(PyTorch's from the first steady call on; XLA's own count cannot be set back and holds what it tried while compiling;
in parentheses what the step takes by XLA's analysis); what the device got back when the process ended; and how many
tensors crossed between PyTorch and XLA in one call at the same device address, of all that crossed; the error against
the same weights in float32.
"""

from __future__ import annotations

import argparse
import copy
import json
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import memopt
from benchmarks.row_process import RowProcess, used_bytes
from memopt.comparison.pool import ALLOCATOR
from memopt.comparison.processes import driver_version
from memopt.convert.write import write_whole

SIZES: dict[str, dict[str, int]] = {
    "resnet50": {"batch": 64, "resolution": 224},
    "gpt2_medium": {"batch": 8, "sequence": 1024},
}
MODES = ("inference", "training")
ENGINES = ("xla", "inductor", "memopt", "eager")
REPEATS = 20
# XLA's allocator would take three quarters of the device, and PyTorch's would keep blocks that no longer fit.
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.32",
    "PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR, "TORCHINDUCTOR_COMPILE_THREADS": "4",
}  # fmt: skip


# -- one row, in a process of its own ---------------------------------------------------------------------------------


class Step:
    """One engine's call, or forward and backward, of one model."""

    def __init__(self, name: str, engine: str, mode: str, tiny: bool) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.trains = mode == "training"
        torch.manual_seed(0)
        self.model = memopt.models.build(name, tiny=tiny, dropout=0.0).to(self.device, torch.bfloat16)
        given = self.model.example_inputs(**({"batch": 2} if tiny else SIZES[name]), labels=self.trains)
        self.inputs = {key: value.bfloat16() if value.is_floating_point() else value for key, value in given.items()}
        self.model.train(self.trains)
        self.run: Any = self.model
        if engine == "inductor":
            self.run = torch.compile(self.model)
        elif engine in ("xla", "memopt"):
            backend = {"xla": "xla", "memopt": "inductor"}[engine]
            self.run = memopt.compile(self.model, backend=backend, verify=False)

    def __call__(self) -> None:
        self.model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(self.trains):
            result: torch.Tensor = self.run(**self.inputs)
        if self.trains:
            result.backward()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def error(self) -> float:
        """How far results (in training gradients) are from those of the same weights in float32, relative to these."""
        found = self.values(self.run, self.model, self.inputs)
        wide = {key: value.float() if value.is_floating_point() else value for key, value in self.inputs.items()}
        model = copy.deepcopy(self.model).float()
        expected = self.values(model, model, wide)
        return float((found - expected).norm() / expected.norm())

    def values(self, run: Any, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(self.trains):
            result: torch.Tensor = run(**inputs)
        if not self.trains:
            return result.float().flatten()
        result.backward()
        return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def worker(name: str, engine: str, mode: str, tiny: bool) -> None:
    step = Step(name, engine, mode, tiny)
    print("the model is built", file=sys.stderr, flush=True)
    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    step()
    start = time.perf_counter()
    step()
    print(f"READY first call {first:.1f} s, third {(time.perf_counter() - start) * 1e3:.1f} ms", flush=True)
    step.model.zero_grad(set_to_none=True)
    if step.device.type == "cuda":
        torch.cuda.empty_cache()  # while it waits, others need the memory
    sys.stdin.readline()
    step()
    if step.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(3 if tiny else REPEATS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    own = torch.cuda.max_memory_allocated() if step.device.type == "cuda" else 0
    row: dict[str, Any] = {
        "model": name, "row": engine, "mode": mode, "seconds": statistics.median(times), "first_call_seconds": first,
        "torch_bytes": own,
    }  # fmt: skip
    if engine == "xla":
        row["xla_bytes"] = xla_bytes(step.device)
        row["analysed_bytes"] = step.run.report.peak_bytes
        row["temporaries_bytes"] = max(one.temporaries for one in step.run.report.executables)
        with crossings() as crossed:
            step()
        row["crossed"], row["shared"] = len(crossed), sum(crossed)
    row["peak_bytes"] = own + row.get("xla_bytes", 0)
    row["error"] = step.error()
    print("ROW", json.dumps(row), flush=True)
    sys.stdin.readline()


def xla_bytes(device: torch.device) -> int:
    """The most that XLA's allocator held."""
    import jax

    return int((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)) if device.type == "cuda" else 0


@contextmanager
def crossings() -> Iterator[list[bool]]:
    """What crosses between PyTorch and XLA meanwhile: for each tensor whether its address stayed the same."""
    from memopt.xla import exchange

    found: list[bool] = []
    to_jax, export = exchange.to_jax, exchange.Exporter.__call__

    def into(value: torch.Tensor) -> Any:
        array = to_jax(value)
        found.append(array.unsafe_buffer_pointer() == value.data_ptr())
        return array

    def back(self: Any, array: Any, *like: Any) -> torch.Tensor:
        address = array.unsafe_buffer_pointer()
        value = export(self, array, *like)
        found.append(value.data_ptr() == address)
        return value

    with mock.patch.object(exchange, "to_jax", into), mock.patch.object(exchange.Exporter, "__call__", back):
        yield found


# -- all rows ---------------------------------------------------------------------------------------------------------


class XlaRow(RowProcess):
    """One row's process."""

    def __init__(self, model: str, engine: str, mode: str, tiny: bool) -> None:
        self.mode, self.late, self.started = mode, False, time.monotonic()
        command = [
            sys.executable,
            "-m",
            "benchmarks.xla_gpu",
            "--worker",
            model,
            engine,
            mode,
            *["--tiny"][: int(tiny)],
        ]
        super().__init__(model, engine, command, ENVIRONMENT)

    def prepare(self, seconds: float) -> None:
        """Wait until it is compiled, and say so: a time taken now is while others compile. What is late is ended."""
        said = self.wait_for("READY", seconds)
        took = f"after {time.monotonic() - self.started:.0f} s"
        print(f"{self.model} {self.row} {self.mode}: {said or 'late' if said != '' else 'ended'} {took}", flush=True)
        if said is None:
            self.late = True
            self.kill()


class Table:
    """The rows that are timed, and their file."""

    def __init__(self, given: argparse.Namespace, cuda: bool) -> None:
        self.given, self.cuda = given, cuda
        self.end = time.monotonic() + given.seconds
        self.rows: list[dict[str, Any]] = []

    def left(self) -> float:
        """Seconds that there are for compiling."""
        return max(1.0, self.end - time.monotonic())

    def take_all(self, rows: Sequence[XlaRow], others: Sequence[XlaRow]) -> None:
        """Wait for rows that are compiled side by side, and time one after another."""
        with ThreadPoolExecutor(max(1, len(rows))) as threads:
            list(threads.map(lambda row: row.prepare(self.left()), rows))
        for number, row in enumerate(rows):
            self.take(row, [*others, *rows[number + 1 :]])

    def take(self, row: XlaRow, others: Sequence[XlaRow]) -> None:
        """Time a row that is ready while the others do nothing, note it and write the file."""
        for other in others:
            other.stop()
        line = {"mode": row.mode, **row.finish(self.cuda)}
        for other in others:
            other.resume()
        if row.late:
            line["error_text"] = f"not ready within the {self.given.seconds:g} s that there were for everything"
        self.rows.append(line)
        print(json.dumps(line), flush=True)
        if self.given.out:
            write_whole(self.given.out, (json.dumps(self.described(), indent=1) + "\n").encode())

    def described(self) -> dict[str, Any]:
        """What the file holds."""
        settings = {"tiny": self.given.tiny, "dtype": "bfloat16", "dropout": 0, "repeats": REPEATS, "sizes": SIZES}
        return {
            "machine": torch.cuda.get_device_name() if self.cuda else "cpu",
            "driver": (driver_version() or "not known") if self.cuda else "",
            "torch": torch.__version__, "jax": version("jax"), "memopt": memopt.__version__,
            "settings": {**settings, "environment": ENVIRONMENT}, "rows": self.rows,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--jobs", type=int, default=1, help="rows of XLA that are compiled at a time")
    parser.add_argument("--seconds", type=float, default=900, help="for compiling everything")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(*given.worker, given.tiny)
        return
    cuda = torch.cuda.is_available()
    used_bytes(cuda)
    table = Table(given, cuda)
    cells = [
        (m, e, o) for o in given.modes.split(",") for m in given.models.split(",") for e in given.engines.split(",")
    ]
    signal.signal(signal.SIGTERM, lambda *ignored: sys.exit(1))
    others = [XlaRow(*cell, given.tiny) for cell in cells if cell[1] != "xla"]
    running = list(others)
    try:
        # Few at a time: XLA measures kernels while it compiles, and keeps what memory it took for that.
        compiled = [cell for cell in cells if cell[1] == "xla"]
        for start in range(0, len(compiled), given.jobs):
            rows = [XlaRow(*cell, given.tiny) for cell in compiled[start : start + given.jobs]]
            running += rows
            table.take_all(rows, others)
        table.take_all(others, [])
    finally:
        for row in running:
            row.kill()


def version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


if __name__ == "__main__":
    main()
