"""Train in users' own loops within 0.9, 0.7 and 0.5 of eager's peak, and measure whole steps, what is outside included.

python -m benchmarks.loop_budgets [LOOP …] [--engine aten|inductor] [--tiny] [--json FILE]

A step's peak is what lives when it begins, found storage by storage, and the allocator's events from there to the
step's end. The first steps are not measured: in those memopt plans, and looks at the allocator itself, which nobody
else can do meanwhile; and what was allocated before the allocator was looked at is released unseen. A row is a loop; a
cell is the largest peak over the budget, or the minimum that a refusal names, over the budget; "said" where memopt
itself reports that a step was over it. Prints the table last, and ends with 1 where a step was over unsaid.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memopt
from benchmarks.loops import LOOPS, STEPS, User
from memopt.memory.allocator_events import Recording

SHARES = (0.9, 0.7, 0.5)
ALONE, MEASURED = 4, 2  # steps before the allocator is looked at, and of those after, the last ones that count
TINY = ("cross_entropy", "accumulation", "keeps_probabilities", "clip_norm")


def storages(beside: frozenset[int] = frozenset()) -> dict[int, torch.UntypedStorage]:
    """All storages that Python's tensors show on the CPU, by address; without those beside."""
    gc.collect()
    found: dict[int, torch.UntypedStorage] = {}
    for item in gc.get_objects():
        if not issubclass(type(item), torch.Tensor):
            continue
        for tensor in (item, item.grad if item.is_leaf else None):
            if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type != "cpu":
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in beside:
                found[storage.data_ptr()] = storage
    return found


def bytes_of(live: dict[int, torch.UntypedStorage]) -> int:
    """Of all these storages together."""
    return sum(storage.nbytes() for storage in live.values())


def peaks(name: str, budget: int | None, engine: str) -> tuple[list[int], int, bool]:
    """The peaks of the last steps; bytes that live when one begins; whether memopt said that one was over."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    beside = frozenset(storages())
    user, found, held = User(budget, engine), list[int](), 0
    steps = LOOPS[name](user)
    for _ in range(ALONE):
        next(steps)
    for _ in range(STEPS - ALONE):
        live = storages(beside)
        begun, recording = bytes_of(live), Recording(torch.device("cpu"), live.values())
        live.clear()
        with recording:
            next(steps)
        found.append(begun + recording.peak)
        held = max(held, begun)
    said = user.said
    steps.close()
    return found[-MEASURED:], held, said


def cell(name: str, share: float, eager: int, engine: str) -> dict[str, Any]:
    budget, began = int(share * eager), time.perf_counter()
    row: dict[str, Any] = {"share": share, "budget": budget}
    try:
        found, _, said = peaks(name, budget, engine)
        row |= {"peaks": found, "said": said}
    except memopt.BudgetError as error:
        row |= {"minimum": error.minimum_bytes, "why": str(error)}
    except Exception as error:
        row |= {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def shown(item: dict[str, Any]) -> str:
    if "failed" in item:
        return "failed"
    if "minimum" in item:
        return f"least {item['minimum'] / item['budget']:.2f}"
    peak = max(item["peaks"]) / item["budget"]
    mark = "" if peak <= 1 else " said" if item["said"] else " OVER"
    last = f", then {item['peaks'][-1] / item['budget']:.3f}" if peak > 1 else ""
    return f"{peak:.3f}{last}{mark}"


def table(rows: list[dict[str, Any]]) -> str:
    shares = [item["share"] for item in rows[0]["cells"]]
    lines = ["| loop | eager, MB | held | " + " | ".join(f"{share:g}" for share in shares) + " |"]
    lines.append("|---|---|---|" + "---|" * len(shares))
    for row in rows:
        cells = " | ".join(shown(item) for item in row["cells"])
        lines.append(f"| {row['loop']} | {row['eager'] / 1e6:.2f} | {row['held'] / row['eager']:.2f} | {cells} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loops", nargs="*")
    parser.add_argument("--engine", default="aten")
    parser.add_argument("--tiny", action="store_true", help=f"only {', '.join(TINY)}, at 0.7")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("memopt").setLevel(logging.CRITICAL)
    shares, rows = (0.7,) if args.tiny else tuple(args.shares), []
    for name in args.loops or (TINY if args.tiny else LOOPS):
        found, held, _ = peaks(name, None, args.engine)
        eager = max(found)
        cells = [cell(name, share, eager, args.engine) for share in shares]
        rows.append({"loop": name, "eager": eager, "held": held, "cells": cells})
        seconds = sum(item["seconds"] for item in cells)
        print(f"{name} ({seconds:.0f} s): {'; '.join(map(shown, cells))}", file=sys.stderr, flush=True)
        for item in cells:
            if "failed" in item or "why" in item:
                print(f"    {item['share']}: {item.get('failed') or item['why']}", file=sys.stderr, flush=True)
    if args.json:
        Path(args.json).write_text(
            json.dumps({"torch": torch.__version__, "engine": args.engine, "rows": rows}, indent=1) + "\n"
        )
    print(table(rows))
    return int(any("OVER" in shown(item) or "failed" in item for row in rows for item in row["cells"]))


if __name__ == "__main__":
    sys.exit(main())
