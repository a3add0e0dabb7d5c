"""A user's loop on two devices: DistributedDataParallel and FSDP2 by the usual recipes, compiled, and within budgets.

Llama of transformers, a batch a rank; with DDP float32 weights under bf16 autocast, with FSDP2 bf16 parameters and
float32 reduction, block by block and then the root; `inside` is a model with DistributedDataParallel in it. Each row is
two processes of its own, and what they reserved is the most of their whole lives. A budget is a share of what the
compiled peer of the same kind reserved on its worst rank.

python benchmarks/two_gpus.py --device cuda --json two_gpus_llama_1b.json
python benchmarks/two_gpus.py --tiny
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import memopt

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from user_models import TINY, batches, built  # noqa: E402 - found once its folder is on the path

ROWS = "ddp_compile,fsdp_compile,ddp_memopt:0.8,fsdp_memopt:0.8,ddp_memopt:0.6,fsdp_memopt:0.6,fsdp,fsdp_checkpoint,ddp"
MODEL, SIZES = "llama_1b", {"batch": 2, "length": 2048}


def made(row: str, device: str, *, tiny: bool, budget: int | None) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """The model with its optimizer, and what the loop calls: as the row has it."""
    kind, _, engine = row.partition(":")[0].partition("_")
    model = built(MODEL, tiny=tiny).to(device)
    if engine == "checkpoint":
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    if kind == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.model.layers:  # type: ignore[union-attr]
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.startswith("cuda"))
    run: Any = model
    if engine == "memopt":
        run = memopt.compile(model, budget=f"{budget}B", optimizer=optimizer)
    if kind in ("ddp", "inside"):
        run = DistributedDataParallel(run, gradient_as_bucket_view=True)
    if kind == "inside":
        run = memopt.compile(run, budget=f"{budget}B", optimizer=optimizer)
    if engine == "compile":
        run = torch.compile(run)
    return model, run, optimizer


def work(given: argparse.Namespace) -> dict[str, Any]:
    """One rank of one row: the losses, the time of a step, and what was reserved."""
    cuda = given.device.startswith("cuda")
    device = f"cuda:{given.rank}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(given.rank)
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{given.store}", rank=given.rank, world_size=given.ranks
    )
    sizes = TINY if given.tiny else SIZES
    model, run, optimizer = made(given.row, device, tiny=given.tiny, budget=given.budget)
    batch = batches(MODEL, 4 * given.ranks, sizes, tiny=given.tiny, device=device)[given.rank :: given.ranks]
    cast = torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=given.row.startswith(("ddp", "inside")))

    def step(number: int) -> torch.Tensor:
        with cast:
            loss = run(**batch[number % len(batch)]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()  # type: ignore[no-any-return]

    began = time.perf_counter()
    losses = [float(step(0))]
    first = time.perf_counter() - began
    losses += [float(step(number)) for number in range(1, given.losses)]
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) if cuda else 0
    seconds = [_timed(step, number, cuda) for number in range(given.repeats)]
    found: dict[str, Any] = {
        "losses": losses,
        "first_step_seconds": first,
        "seconds": statistics.median(seconds),
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) - retries if cuda else 0,
        "allocated_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved() if cuda else 0,
    }
    report = getattr(getattr(run, "module", run), "report", None)
    if isinstance(report, memopt.Report):
        found.update(predicted_bytes=report.peak_bytes, minimum_bytes=report.minimum_bytes, notes=list(report.notes))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found


def _timed(step: Callable[[int], Any], number: int, cuda: bool) -> float:
    began = time.perf_counter()
    step(number)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def run_row(row: str, budget: int | None, given: argparse.Namespace) -> dict[str, Any]:
    """What the worst rank of a row took, or why there is no row."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "MEMOPT_CACHE_DIR": f"{folder}/memopt"}
        settings = ["--device", given.device, "--losses", str(given.losses), "--repeats", str(given.repeats)]
        settings += ["--ranks", str(given.ranks)]
        settings += ["--tiny"] if given.tiny else []
        settings += [] if budget is None else ["--budget", str(budget)]
        started = []
        for rank in range(given.ranks):
            own = ["--row", row, "--rank", str(rank), "--store", f"{folder}/store", "--out", f"{folder}/{rank}.json"]
            with open(f"{folder}/{rank}.log", "w") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, __file__, *own, *settings],
                        stdout=log,
                        stderr=log,
                        env={**os.environ, **caches},
                    )
                )
        ends = time.monotonic() + given.limit
        while any(process.poll() is None for process in started) and time.monotonic() < ends:
            if any(process.poll() for process in started):
                time.sleep(5)  # the others hear of it
                break
            time.sleep(0.2)
        for process in started:
            process.kill()
            process.wait()
        ranks = [Path(f"{folder}/{rank}.json") for rank in range(given.ranks)]
        if not all(path.exists() for path in ranks):
            lines = [Path(f"{folder}/{rank}.log").read_text().strip().splitlines()[-1:] for rank in range(given.ranks)]
            return {"row": row, "budget_bytes": budget, "reason": next((line[0] for line in lines if line), "killed")}
        found = [json.loads(path.read_text()) for path in ranks]
    worst = {key: max(rank[key] for rank in found) for key in found[0] if key.endswith(("bytes", "seconds", "retries"))}
    return {"row": row, "budget_bytes": budget, **worst, "losses": [rank["losses"] for rank in found],
            "notes": found[0].get("notes", [])}  # fmt: skip


def main() -> None:
    """Run the rows, one after another; print each as it ends, and write the file."""
    given = _arguments()
    if given.row:
        Path(given.out).write_text(json.dumps(work(given)))
        return
    rows: dict[str, dict[str, Any]] = {}
    for row in given.rows.split(","):
        kind, share = row.replace("inside:", "ddp_:").partition("_")[0], row.partition(":")[2]
        peer = rows.get(f"{kind}_compile", {}).get("reserved_bytes") or given.reference
        budget = int(float(share) * peer) if share else None
        rows[row] = run_row(row, budget, given)
        print(_line(rows[row], rows.get(f"{kind}_compile", {})), flush=True)
        if given.json:
            Path(given.json).write_text(json.dumps(_described(given, rows), indent=1) + "\n")


def _line(found: dict[str, Any], peer: dict[str, Any]) -> str:
    budget = found["budget_bytes"]
    if "seconds" not in found:
        return f"{found['row']:18} {'-' if budget is None else f'{budget / 1e6:,.0f}':>8} {found['reason'][:300]}"
    ratio = found["seconds"] / peer["seconds"] if "seconds" in peer else float("nan")
    over = "OVER" if budget is not None and found["reserved_bytes"] > budget else ""
    return (
        f"{found['row']:18} {'-' if budget is None else f'{budget / 1e6:,.0f}':>8} "
        f"{found['reserved_bytes'] / 1e6:10,.0f} {found['allocated_bytes'] / 1e6:10,.0f} "
        f"{found['seconds'] * 1e3:9.1f} {ratio:6.3f} {found['first_step_seconds']:7.1f} "
        f"{found['losses'][0][-1]:.5f} {found['retries']:4} {over}"
    )


def _described(given: argparse.Namespace, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    import transformers

    cuda = given.device.startswith("cuda")
    return {
        "machine": f"{given.ranks} x {torch.cuda.get_device_name()}" if cuda else platform.processor() or "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "memopt": memopt.__version__,
        "model": MODEL,
        "settings": {**(TINY if given.tiny else SIZES), "losses": given.losses, "repeats": given.repeats},
        "rows": list(rows.values()),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--losses", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--limit", type=float, default=300, help="seconds of a row")
    parser.add_argument("--reference", type=int, default=20_000_000, help="bytes, where no row gives them (on a CPU)")
    parser.add_argument("--json")
    for name in ("--row", "--store", "--out"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--rank", "--budget"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
