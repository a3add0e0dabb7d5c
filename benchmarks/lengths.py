"""A training loop over batches of many lengths: torch.compile beside memopt, which finds out or is told that they vary.

Every row runs in a process of its own with empty caches, one after another: nothing else should run on the machine.

python benchmarks/lengths.py --json benchmarks/results/lengths_cpu.json
python benchmarks/lengths.py --device cuda --dtype bfloat16 --hidden 1024 --layers 24 --longest 1024 --batch 8 \
    --budget 20GB --lengths 50 --json benchmarks/results/lengths_h100.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.row_process import run_alone

ROWS = ("compile", "memopt", "memopt dynamic", "memopt static")


def lengths_of(given: argparse.Namespace) -> list[int]:
    """Different lengths in random order, the same for every row."""
    return random.Random(given.seed).sample(range(max(2, given.longest // 8), given.longest + 1), given.lengths)


def worker(given: argparse.Namespace) -> int:
    import torch
    import transformers

    import memopt

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=given.hidden, intermediate_size=2 * given.hidden, num_hidden_layers=given.layers,
        num_attention_heads=given.heads, num_key_value_heads=given.heads, vocab_size=given.vocabulary,
        max_position_embeddings=max(256, given.longest), use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train().to(given.device, getattr(torch, given.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if given.worker == "compile":
        run: Any = torch.compile(model)
    else:
        dynamic = {"memopt dynamic": True, "memopt static": False}.get(given.worker)
        run = memopt.compile(model, given.budget, optimizer=optimizer, dynamic=dynamic)
    seconds, losses = [], []
    for number, length in enumerate(lengths_of(given)):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, given.vocabulary, (given.batch, length), generator=generator).to(given.device)
        began = time.perf_counter()
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - began)
    found = {"row": given.worker, "seconds": seconds, "losses": losses}
    if given.device.startswith("cuda"):
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    if given.worker != "compile":
        found |= {"peak_bytes": run.report.peak_bytes, "budget_bytes": run.report.budget_bytes}
        found["notes"] = list(run.report.notes)
    print("ROW " + json.dumps(found), flush=True)
    return 0


def run_row(row: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as caches:
        return run_alone(row, [sys.executable, __file__, *sys.argv[1:], "--worker", row], Path(caches))


def line_of(row: dict[str, Any], first: dict[str, Any]) -> str:
    """One row as a line: seconds in all, of the second half of the loop, and beside torch.compile's."""
    if "error" in row:
        return f"{row['row']:16} {row['error']}"
    seconds = row["seconds"]
    later = seconds[len(seconds) // 2 :]
    line = f"{row['row']:16} {sum(seconds):8.1f} s in all, then {statistics.median(later) * 1e3:8.1f} ms a step"
    line += f", the longest of those {max(later) * 1e3:8.1f} ms"
    if "error" not in first and first is not row:
        ratio = sum(seconds) / sum(first["seconds"])
        apart = max(abs(a - b) for a, b in zip(row["losses"], first["losses"], strict=True))
        line += f"; {ratio:.2f} of torch.compile's time, losses apart by {apart:.1e} at most"
    return line


def described(given: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    import memopt

    cuda = given.device.startswith("cuda")
    settings = {name: value for name, value in vars(given).items() if name not in ("json", "worker", "rows")}
    return {
        "machine": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "memopt": memopt.__version__,
        "settings": settings,
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("hidden", 64), ("layers", 2), ("heads", 4), ("vocabulary", 512), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--lengths", type=int, default=24, help="how many different ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", default="60MB")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", default=",".join(ROWS[:3]), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return worker(given)
    rows: list[dict[str, Any]] = []
    for name in given.rows.split(","):
        rows.append(run_row(name))
        print(line_of(rows[-1], rows[0]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(described(given, rows), indent=1) + "\n")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
