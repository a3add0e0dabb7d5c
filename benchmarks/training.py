"""Training steps beside the peers: eager, checkpointed blocks, torch.compile, its memory budget, and memopt's budgets.

Every row runs in a process of its own. Rows are compiled side by side (--jobs) and timed one after another.
Budgets are shares of what torch.compile reserves (on CPU, allocates); `least` is the least that memopt says it can do,
plus 2 %.

python benchmarks/training.py --model gpt2_medium --device cuda --dtype bfloat16 --json out.json
python benchmarks/training.py --model unet --tiny --rows eager,compile,memopt:0.8
python benchmarks/training.py --layers 8 --rows compile,memopt:0.5 --profile --json out.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import kernels

SIZES: dict[str, dict[str, int]] = {
    "gpt2_medium": {"batch": 16, "sequence": 1024},
    "llama_1b": {"batch": 4, "sequence": 2048},
    "unet": {"batch": 8, "resolution": 512},
    "bert_large": {"batch": 32, "sequence": 512},
    "resnet152": {"batch": 128, "resolution": 224},
    "densenet161": {"batch": 96, "resolution": 224},
}
# What people wrap in torch.utils.checkpoint; a U-Net's blocks are plain Sequentials.
BLOCKS = ("Block", "Layer", "Bottleneck", "BasicBlock", "DenseLayer", "Up")
PEERS = ("eager", "checkpoint", "compile", "compile:0.7", "compile:0.5", "compile:0.3", "compile:0.1")
OURS = ("memopt:1.0", "memopt:0.8", "memopt:0.6", "memopt:0.5", "memopt:0.4", "memopt:0.3", "memopt:least")
# The same allocator for all rows: without it every row reserves more than it allocates.
ALLOCATOR = "expandable_segments:True"


# -- one row, in a process of its own ---------------------------------------------------------------------------------


def worker(given: argparse.Namespace) -> int:
    import torch

    import memopt

    torch.manual_seed(0)
    fewer = {} if given.layers is None else {"layers": given.layers}
    model = memopt.models.build(given.model, tiny=given.tiny, **fewer).to(given.device, getattr(torch, given.dtype))
    sizes = {} if given.tiny else {k: v for k, v in SIZES[given.model].items() if k != "batch"}
    inputs = model.example_inputs(given.batch, labels=True, **sizes)
    cuda = given.device.startswith("cuda")

    def enqueue() -> None:
        model.zero_grad()
        run(**inputs).backward()

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    def step() -> None:
        enqueue()
        wait()

    started = time.perf_counter()
    row: dict[str, Any] = {"row": given.worker}
    try:
        run = prepare(given, model)
        try:
            step()
        except memopt.BudgetError as error:
            if not given.worker.endswith("least"):
                raise
            given.budget_bytes = int(error.minimum_bytes * 1.02)
            torch._dynamo.reset()
            run = prepare(given, model)
            step()
    except memopt.BudgetError as error:
        row.update(budget_bytes=given.budget_bytes, minimum_bytes=error.minimum_bytes)
        print("READY", flush=True)
        print("ROW " + json.dumps(row), flush=True)
        return 0
    row["first_step_seconds"] = time.perf_counter() - started
    model.zero_grad()
    release(cuda)
    print("READY", flush=True)
    sys.stdin.readline()
    for _ in range(3):
        step()
    model.zero_grad()
    release(cuda)
    seconds = []
    for _ in range(given.repeats):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    row["seconds"], row["fastest_seconds"] = statistics.median(seconds), min(seconds)
    if cuda:
        row["peak_bytes"], row["reserved_bytes"] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:
        model.zero_grad()
        row["peak_bytes"] = memopt.measure(step, device=given.device).peak_bytes + resident_bytes(model, inputs)
    report = getattr(run, "report", None)
    if report is not None:
        row.update(predicted_bytes=report.peak_bytes, minimum_bytes=report.minimum_bytes, notes=list(report.notes))
        row.update(budget_bytes=report.budget_bytes, phases=dict(report.seconds))
    if given.profile:
        row["profile"] = {**kernels.profiled(step, given.device), "host": kernels.host_seconds(enqueue, wait, 3)}
    print("ROW " + json.dumps(row), flush=True)
    return 0


def prepare(given: argparse.Namespace, model: Any) -> Callable[..., Any]:
    import torch

    import memopt

    kind, _, setting = given.worker.partition(":")
    if kind == "eager":
        return model  # type: ignore[no-any-return]
    if kind == "checkpoint":
        checkpointed(model)
        return model  # type: ignore[no-any-return]
    if kind == "compile":
        if setting:
            torch._functorch.config.activation_memory_budget = float(setting)
        return torch.compile(model)  # type: ignore[no-any-return]
    return memopt.compile(model, given.budget_bytes, backend=given.backend)


def checkpointed(model: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    for module in model.modules():
        if type(module).__name__ in BLOCKS:
            forward = module.forward
            module.forward = lambda *args, _forward=forward: checkpoint(_forward, *args, use_reentrant=False)


def resident_bytes(model: Any, inputs: dict[str, Any]) -> int:
    tensors = (*model.parameters(), *model.buffers(), *inputs.values())
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def release(cuda: bool) -> None:
    import gc

    import torch

    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# -- all rows ---------------------------------------------------------------------------------------------------------


def start(given: argparse.Namespace, row: str, budget: int | None) -> tuple[subprocess.Popen[str], IO[str]]:
    command = [sys.executable, __file__, *given.passed, "--worker", row]
    if budget is not None:
        command += ["--budget-bytes", str(budget)]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR, **os.environ}
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read once the process has ended
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment,
        start_new_session=True,  # with the compiler's own processes, which end with it
    )
    return process, errors


def finish(process: subprocess.Popen[str], errors: IO[str], row: str) -> dict[str, Any]:
    """Let a compiled row be timed, and read its figures; a row that failed says why."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("go\n")
        process.stdin.close()
    found = [line[4:] for line in process.stdout if line.startswith("ROW ")]
    process.wait()
    if not found:
        errors.seek(0)
        last = [line.strip() for line in errors if "Error" in line][-1:]
        return {"row": row, "error": (last or [f"exit code {process.returncode}"])[0][:300]}
    return dict(json.loads(found[0]))


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("READY"):
            return


def wait_for_all(processes: Sequence[subprocess.Popen[str]], patience: float) -> list[bool]:
    """Whether each was ready within so many seconds, all together; those that were not are ended."""
    threads = [threading.Thread(target=wait_until_ready, args=(process,), daemon=True) for process in processes]
    for thread in threads:
        thread.start()
    until = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    ready = [not thread.is_alive() for thread in threads]
    for process, is_ready, thread in zip(processes, ready, threads, strict=True):
        if not is_ready:
            os.killpg(process.pid, signal.SIGKILL)
            thread.join()
    return ready


def run_rows(
    given: argparse.Namespace, rows: Sequence[str], budgets: dict[str, int], results: list[dict[str, Any]]
) -> None:
    """Add the rows to the results, which are written after each: a run that is cut short leaves what it did."""
    for first in range(0, len(rows), given.jobs):
        group = rows[first : first + given.jobs]
        processes = [start(given, row, budgets.get(row)) for row in group]
        ready = wait_for_all([process for process, _ in processes], given.patience)
        for (process, errors), row, is_ready in zip(processes, group, ready, strict=True):
            late = {"row": row, "error": f"not compiled within {given.patience:.0f} s"}
            results.append(finish(process, errors, row) if is_ready else late)
            print(line_of(results[-1]), flush=True)
            if given.json:
                given.json.write_text(json.dumps(described(given, results), indent=1) + "\n")


def described(given: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    import torch

    import memopt

    cuda = given.device.startswith("cuda")
    return {
        "machine": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "memopt": memopt.__version__,
        "allocator": ALLOCATOR if cuda else "",
        "settings": {
            "model": given.model, "tiny": given.tiny, "batch": given.batch, "dtype": given.dtype,
            "device": given.device, "backend": given.backend, "repeats": given.repeats, "jobs": given.jobs,
            **({} if given.layers is None else {"layers": given.layers}),
            **({} if given.tiny else {k: v for k, v in SIZES[given.model].items() if k != "batch"}),
        },
        "rows": rows,
    }  # fmt: skip


def line_of(row: dict[str, Any]) -> str:
    cells = [row.get(key) for key in ("budget_bytes", "predicted_bytes", "peak_bytes", "reserved_bytes")]
    text = " ".join(f"{'-' if cell is None else f'{cell / 1e6:,.2f}':>11}" for cell in cells)
    if "error" in row:
        return f"{row['row']:13} {row['error']}"
    if "seconds" not in row:
        return f"{row['row']:13} {text} refused: the least is {row['minimum_bytes'] / 1e6:,.2f} MB"
    by = "operator by operator" if any("operator by operator" in note for note in row.get("notes", ())) else ""
    return f"{row['row']:13} {text} {row['seconds'] * 1e3:9.2f} {row['first_step_seconds']:9.1f} {by}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2_medium", choices=sorted(SIZES))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layers", type=int, help="fewer blocks than the model has")
    parser.add_argument("--profile", action="store_true", help="where each step's time goes (see kernels.py)")
    parser.add_argument("--jobs", type=int, default=1, help="rows compiled at a time")
    parser.add_argument(
        "--patience", type=float, default=3600.0, help="seconds in which rows are compiled, or left out"
    )
    parser.add_argument("--rows", default=",".join((*PEERS, *OURS)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--budget-bytes", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.passed = sys.argv[1:]
    given.batch = given.batch or (4 if given.tiny else SIZES[given.model]["batch"])
    if given.worker:
        return worker(given)
    chosen = given.rows.split(",")
    print(f"{'row':13} {'budget MB':>11} {'predicted':>11} {'allocated':>11} {'reserved':>11} {'ms':>9} {'first s':>9}")
    rows: list[dict[str, Any]] = []
    run_rows(given, [row for row in chosen if not row.startswith("memopt")], {}, rows)
    compiled = next((row for row in rows if row["row"] == "compile"), {})
    ours = [row for row in chosen if row.startswith("memopt")]
    # A budget is on what is reserved: what torch.compile must be given to run is the whole of it.
    reference = compiled.get("reserved_bytes") or compiled.get("peak_bytes")
    if reference:
        shares = {row: row.partition(":")[2] for row in ours}
        budgets = {row: 1 if share == "least" else int(float(share) * reference) for row, share in shares.items()}
        run_rows(given, ours, budgets, rows)
    elif ours:
        print("memopt's budgets are shares of the peak of the row `compile`, which has none")
    if given.profile:
        print(kernels.table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
