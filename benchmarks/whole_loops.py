"""Train in users' own loops under a budget, and look at all that the process holds from its first step on.

python -m benchmarks.whole_loops [LOOP …] [--engines aten inductor] [--shares 0.75 0.6] [--json FILE] [--markdown FILE]

Each cell is a process of its own, with nothing of memopt's on disk but what operators take, and the allocator is looked
at from outside (`benchmarks/allocator_watch.c`): steps in which memopt plans count. (This machine's speed is known: it
is measured once, with blocks of 64 MB.) A budget is a fraction, or as many bytes as that share of the largest step of
eager's whole loop. A cell is the largest step over its budget; that of a fraction, which is one of the step's own peak,
is what the report says with the process's other tensors. Ends with 1 where a step was over unsaid, numbers differ, or
an error is not a refusal. (As it refuses, memopt tries the minimum that it names: that is no step.)
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import pickle
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.allocator_watch import Watch, preloaded

NEW = ("changes", "contrast", "generation", "policies", "beside", "accumulation", "step_ends", "weights")
NEW += ("after_backward", "inner_calls", "held_out", "pairs", "pairs_of_models", "own_state", "practice")
NEW += ("changing_graphs",)
CLOSE = {"aten": 0.0, "inductor": 2e-3}  # of numbers, beside the largest: code rounds otherwise, and steps add that up
EFFORT, PATIENCE = 100_000, 4  # of searches: a step keeps within whatever plan was found
KINDS = ("fraction", "bytes")
ONE_LINE = "memopt compiles first derivatives only"  # of a refusal that is torch.compile's, too
LEGEND = """By `python -m benchmarks.whole_loops --json FILE --markdown FILE`.

A cell is the largest of twelve steps over the budget. Steps that were over it are numbered, "said" where memopt itself
reports that one was: before a loop's loss, teacher or queue was seen once, its first step cannot be planned with them.
"with checkpoints" is eager's own peak with `torch.utils.checkpoint` around each layer of the model, over eager's: where
that is more than the share, a refusal is what the loop itself holds. Not measured where a cell is empty."""
SCALARS = 256  # bytes of losses and counts, which come and go beside a step


def trained(name: str, budget: int | float | None, engine: str, checkpointed: bool = False) -> dict[str, Any]:
    """Run a loop; its steps' peaks in bytes beyond the beginning, its numbers, and what memopt says of it."""
    import torch

    import memopt
    from benchmarks.loops import LOOPS, User
    from benchmarks.loops.user import Net
    from memopt.module import calls_of

    torch.manual_seed(0)
    Net.checkpointed = checkpointed
    watch, user, heard = Watch(), User(budget, engine), Heard()
    logger = logging.getLogger("memopt")
    logger.propagate, logger.handlers = False, [heard]
    gc.collect()
    gc.freeze()  # what a copy of the process has of the other one is no loop's
    before, peaks, seconds, graphs = watch.live, list[int](), list[float](), list[int]()
    row: dict[str, Any] = {"peaks": peaks, "seconds": seconds, "graphs": graphs}
    above = int(os.environ.get("WATCH_TRAP", 0))
    if above and budget is not None:
        watch.trap(before + above, lambda now, size: (print(now - before, size), traceback.print_stack()))
    watch.begin()
    steps, began = LOOPS[name](user), time.perf_counter()
    try:
        for _ in steps:
            peaks.append(watch.peak - before)
            seconds.append(round(time.perf_counter() - began, 2))
            graphs.append(sum(calls_of(each).sessions.graphs for each in user.compiled))
            began = time.perf_counter()
            watch.begin()
    except memopt.BudgetError as error:
        row |= {"minimum": error.minimum_bytes, "why": str(error)}
    except memopt.CaptureError as error:
        row |= {"why": str(error)}
    except Exception as error:
        if ONE_LINE in str(error):
            row |= {"why": str(error)}
            return row | {"numbers": [], "notes": [], "own": 0, "others": 0, "said": False}
        row |= {"failed": f"{type(error).__name__}: {str(error)[:1000]}", "trace": traceback.format_exc()}
    row["during"] = watch.peak - before
    numbers = [value.detach().double().flatten() for model in user.models for value in model.state_dict().values()]
    row["numbers"] = [torch.tensor(user.losses, dtype=torch.float64), torch.cat(numbers)] if "why" not in row else []
    notes, own, others = list[str](), 0, 0
    for each in user.compiled:
        calls = calls_of(each)
        others = max(others, calls.residents.others.total)
        try:
            notes += each.report.notes
            own = max(own, each.report.budget_bytes or 0)
        except RuntimeError:
            pass
    said = any("over its budget" in line for line in [*heard.lines, *notes])
    return row | {"notes": [*notes, *heard.lines], "own": own, "others": others, "said": said}


class Heard(logging.Handler):
    """Keeps what memopt warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


def apart(function: Any, *given: Any) -> dict[str, Any]:
    """What a function returns in a copy of this process: it finds no plan on disk, but what operators take."""
    with tempfile.TemporaryDirectory() as folder:
        answer, costs = Path(folder) / "answer", Path(os.environ["MEMOPT_CACHE_DIR"]) / "costs"
        costs.mkdir(exist_ok=True)
        (Path(folder) / "memopt").mkdir()
        (Path(folder) / "memopt" / "costs").symlink_to(costs)
        child = os.fork()  # noqa: TID251
        if not child:
            os.environ["MEMOPT_CACHE_DIR"] = f"{folder}/memopt"
            try:
                answer.write_bytes(pickle.dumps(function(*given)))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return pickle.loads(answer.read_bytes()) if answer.exists() else {"failed": "the process ended"}


def difference(one: list[Any], other: list[Any]) -> float:
    """The largest difference of any number, over the largest of its kind."""
    pairs = list(zip(one, other, strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    kinds = [(float((a - b).abs().max()), float(b.abs().max())) for a, b in pairs if a.numel()]
    return max((far / max(most, 1e-9) for far, most in kinds), default=0.0)


def cell(name: str, engine: str, kind: str, share: float, eager: dict[str, Any]) -> dict[str, Any]:
    limit = int(share * max(eager["peaks"]))
    row = apart(trained, name, share if kind == "fraction" else limit, engine)
    row |= {"engine": engine, "kind": kind, "share": share, "limit": limit}
    if kind == "fraction" and row.get("own"):
        row["limit"] = row["own"] + row["others"]
    if row.get("numbers"):
        row["difference"] = difference(row["numbers"], eager["numbers"])
    row.pop("numbers", None)
    return row


def shown(row: dict[str, Any]) -> str:
    if "failed" in row:
        return "**failed**"
    peak = max(row["peaks"], default=0) / row["limit"]
    if "why" in row:
        least = f" {row['minimum'] / row['limit']:.2f}" if "minimum" in row else ""
        return f"refused{least}" + (f" in step {len(row['peaks']) + 1}" if row["peaks"] else "") + over(row)
    return f"{peak:.3f}" + over(row) + ("" if same(row) else f" **numbers {row['difference']:.0e}**") + storm(row)


def over(row: dict[str, Any]) -> str:
    """The steps that were over the budget."""
    steps = [number for number, each in enumerate(row["peaks"], 1) if each > row["limit"] + SCALARS]
    if not steps:
        return ""
    return f" ({'said' if row['said'] else '**over**'}: {', '.join(map(str, steps))})"


def same(row: dict[str, Any]) -> bool:
    return row.get("difference", 0.0) <= CLOSE[row["engine"]]


def storm(row: dict[str, Any]) -> str:
    """Graphs that were still compiled in the last three steps."""
    graphs = row["graphs"]
    late = graphs[-1] - graphs[-4] if len(graphs) > 3 else 0
    return f" **{late} graphs in the last steps**" if late else ""


def bad(row: dict[str, Any]) -> bool:
    return "**" in shown(row)


def table(rows: list[dict[str, Any]]) -> str:
    columns = list(
        dict.fromkeys((each["engine"], each["kind"], each["share"]) for row in rows for each in row["cells"])
    )
    names = [f"{engine}, {share:g}{'' if kind == 'fraction' else ' in bytes'}" for engine, kind, share in columns]
    lines = [f"| loop | eager, MB | with checkpoints | {' | '.join(names)} |", "|---|---|---|" + "---|" * len(names)]
    for row in rows:
        cells = {(each["engine"], each["kind"], each["share"]): shown(each) for each in row["cells"]}
        lines.append(
            f"| {row['loop']} | {row['eager'] / 1e6:.2f} | {row['checkpointed'] / row['eager']:.2f} | "
            + " | ".join(cells.get(column, "") for column in columns)
            + " |"
        )
    return "\n".join(lines)


def reasons(rows: list[dict[str, Any]]) -> str:
    found: dict[str, list[str]] = {}
    for row in rows:
        for each in row["cells"]:
            why = each.get("why") or each.get("failed") or ""
            if why:
                kind = "" if each["kind"] == "fraction" else " in bytes"
                place = f"{row['loop']}, {each['engine']}, {each['share']:g}{kind}"
                found.setdefault(why, []).append(place)
    return "\n".join(f"- {'; '.join(places)}: {' '.join(why.split())}" for why, places in found.items())


def main() -> int:
    preloaded("benchmarks.whole_loops")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loops", nargs="*")
    parser.add_argument("--engines", nargs="+", default=["aten", "inductor"])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.75, 0.6])
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--json", help="what was measured; cells of other runs that are there stay, and go into tables")
    parser.add_argument("--markdown", help="the table and the refusals of all that is in the JSON file")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    args = parser.parse_args()
    import torch

    from benchmarks.loops import LOOPS
    from memopt.solve import recompute

    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ.setdefault("MEMOPT_CACHE_DIR", tempfile.mkdtemp())
    recompute.EFFORT, recompute.PATIENCE = EFFORT, PATIENCE
    known = Path(args.json) if args.json else None
    rows: list[dict[str, Any]] = json.loads(known.read_text()) if known is not None and known.exists() else []
    chosen = [name for name, each in LOOPS.items() if each.__module__.rpartition(".")[2] in NEW]
    for name in () if args.render else args.loops or chosen:
        eager = apart(trained, name, None, "aten")
        if "failed" in eager:
            raise RuntimeError(f"{name}: {eager['trace']}")
        row = {"loop": name, "eager": max(eager["peaks"]), "eager_peaks": eager["peaks"]}
        row["checkpointed"] = max(apart(trained, name, None, "aten", True)["peaks"])
        row["cells"] = [
            cell(name, engine, kind, share, eager)
            for engine in args.engines
            for share in args.shares
            for kind in args.kinds
        ]
        measured = [(each["engine"], each["kind"], each["share"]) for each in row["cells"]]
        before = next((each for each in rows if each["loop"] == name), {"cells": []})
        others = [each for each in before["cells"] if (each["engine"], each["kind"], each["share"]) not in measured]
        seconds = sum(sum(each.get("seconds", ())) for each in row["cells"])
        print(f"{name} ({seconds:.0f} s): {'; '.join(map(shown, row['cells']))}", flush=True)
        for each in row["cells"]:
            if "why" in each or bad(each):
                place = f"    {each['engine']} {each['kind']} {each['share']}"
                print(f"{place}: {each.get('why') or each.get('failed') or ''}", flush=True)
                if bad(each):
                    figures = {key: each.get(key) for key in ("limit", "during", "peaks", "graphs")}
                    print(f"        {figures}")
                    print(f"        notes {each.get('notes')}", flush=True)
        row["cells"] = [*others, *row["cells"]]
        rows = [*(each for each in rows if each["loop"] != name), row]
        if known is not None:
            known.write_text(json.dumps(rows, indent=1, default=float) + "\n")
    if args.markdown:
        title = "# Loops that nobody tuned for, whole steps from the first on"
        text = f"{title}\n\ntorch {torch.__version__}, CPU, one thread"
        Path(args.markdown).write_text(f"{text}. {LEGEND}\n\n{table(rows)}\n\nRefused:\n\n{reasons(rows)}\n")
    print(table(rows))
    return int(any(bad(each) for row in rows for each in row["cells"]))


if __name__ == "__main__":
    sys.exit(main())
