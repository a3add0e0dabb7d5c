"""What inference takes beside its weights: order, arena and what the allocator saw, per model, on one CPU core.

python benchmarks/arena.py --json benchmarks/results/arena_cpu.json --svg build/arena
python benchmarks/arena.py --tiny

Columns, in bytes: the sum of all values; eager's measured peak above weights and inputs; the most in use at once in the
order given, and in the order that `Reorder` finds (all copies made); the same with concatenations avoided; the arena of
the plan that runs, scratch memory included, its proven lower bound, and what greedy-by-size would take; and what a
steady call of backend "static" was seen to allocate beside what its results take.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import memopt
from benchmarks.arena_svg import arena_svg
from memopt.backends.static import StaticBackend
from memopt.capture.export import from_module
from memopt.memory.allocator_events import record
from memopt.memory.buffers import BufferPlan, Home
from memopt.memory.measure import measure
from memopt.pass_manager import PassManager
from memopt.passes.inplace import Inplace
from memopt.passes.plan_buffers import ALIGNMENT, plan_buffers
from memopt.passes.reorder import Reorder, lower_order
from memopt.program import InputKind, Program
from memopt.solve.order import smallest_peak

MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("densenet121", {"batch": 1}),
    ("densenet121", {"batch": 8}),
    ("densenet161", {"batch": 1}),
    ("unet", {"batch": 1}),
    ("mobilenet_v3_large", {"batch": 1}),
    ("mobilenet_v3_small", {"batch": 1}),
    ("resnet18", {"batch": 1}),
    ("resnet50", {"batch": 1}),
    ("resnet152", {"batch": 1}),
    ("searched_cells", {"batch": 1}),
    ("vit_b_16", {"batch": 1}),
    ("bert_base", {"batch": 1, "sequence": 512}),
    ("bert_large", {"batch": 1, "sequence": 512}),
    ("gpt2", {"batch": 1, "sequence": 512}),
    ("gpt2_medium", {"batch": 1, "sequence": 512}),
    ("llama_tiny", {"batch": 1, "sequence": 256}),
    ("llama_1b", {"batch": 1, "sequence": 512}),
)
PLANNED_ONLY = ("llama_1b",)  # its weights take 5 GB


class Cell(nn.Module):
    """A cell as architecture search finds them: five blocks, each the sum of two operations on earlier states."""

    PAIRS = ((0, 1), (0, 1), (1, 2), (0, 3), (2, 4))

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.ModuleList(nn.Conv2d(5 * channels, channels, 1) for _ in range(2))
        self.operations = nn.ModuleList(
            nn.Sequential(
                nn.ReLU(), nn.Conv2d(channels, 3 * channels, 3, padding=1), nn.Conv2d(3 * channels, channels, 1)
            )
            for _ in range(2 * len(self.PAIRS))
        )

    def forward(self, before: Tensor, x: Tensor) -> Tensor:
        """Two states of 5·channels → one; written layer by layer, as graphs of cells are."""
        states = [self.squeeze[0](before), self.squeeze[1](x)]
        for number, (a, b) in enumerate(self.PAIRS):
            first, second = self.operations[2 * number], self.operations[2 * number + 1]
            wide = [module[1](module[0](states[k])) for module, k in ((first, a), (second, b))]
            states.append(first[2](wide[0]) + second[2](wide[1]))
        return torch.cat(states[2:], 1)


class SearchedCells(nn.Module):
    """A stem and some cells, each of which reads the two states before it."""

    def __init__(self, channels: int = 16, cells: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5 * channels, 3, 2, 1)
        self.cells = nn.ModuleList(Cell(channels) for _ in range(cells))
        self.head = nn.Linear(5 * channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, 3, h, w) → logits (batch, 10)."""
        before = x = self.stem(images)
        for cell in self.cells:
            before, x = x, cell(before, x)
        return self.head(x.mean((2, 3)))


def models(tiny: bool, only: Sequence[str]) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    for name, sizes in MODELS:
        if only and name not in only:
            continue
        torch.manual_seed(0)
        label = name + "".join(f" {value}" for value in sizes.values())
        if name == "searched_cells":
            size = 16 if tiny else 112
            yield label, SearchedCells(4 if tiny else 16), {"images": torch.randn(sizes["batch"], 3, size, size)}
            continue
        planned_only = name in PLANNED_ONLY and not tiny
        with torch.device("meta" if planned_only else "cpu"):
            model = memopt.models.build(name, tiny=tiny)
        if planned_only:
            model.to_empty(device="cpu")  # no page of it is ever touched
        yield label, model, model.example_inputs(sizes["batch"]) if tiny else model.example_inputs(**sizes)


def values_alone(program: Program, joins: bool) -> BufferPlan:
    """The plan of all values, as if every operator wrote where it is told and needed nothing else."""
    return plan_buffers(program, joins=joins)


def greedy_by_size(plan: BufferPlan) -> int:
    """The bytes that largest-first placement reaches for the plan's blocks."""
    placed: list[tuple[int, int, int, int]] = []
    blocks = [block for block in plan.blocks if block.home is Home.ARENA and block.nbytes]
    for block in sorted(blocks, key=lambda block: (-block.nbytes, block.start)):
        size = -(-block.nbytes // ALIGNMENT) * ALIGNMENT
        offset = 0
        for low, high, start, end in sorted(placed):
            if start < block.end and block.start < end:
                if low - offset >= size:
                    break
                offset = max(offset, high)
        placed.append((offset, offset + size, block.start, block.end))
    return max((high for _, high, _, _ in placed), default=0)


def best_of(repeats: int, *runs: Callable[[], Any]) -> list[float]:
    """The least seconds of each of the runs, which take turns."""
    best = [float("inf")] * len(runs)
    for _ in range(repeats):
        for index, run in enumerate(runs):
            began = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - began)
    return best


def row_of(name: str, model: nn.Module, inputs: dict[str, Any], repeats: int, svg: Path | None) -> dict[str, Any]:
    captured = from_module(model, (), inputs)
    early = [item for item in memopt.INFERENCE if not isinstance(item, (Reorder, Inplace))]
    given, _ = PassManager(early, verify=False).run(captured)
    order = smallest_peak(lower_order(given).problem)
    reordered = Reorder().run(given).program
    final = Inplace().run(reordered).program
    concatenated = sum(len(node.args[0]) for node in final.calls if node.target is torch.ops.aten.cat.default)
    plan = StaticBackend().buffer_plan(final)
    if svg is not None:
        svg.mkdir(parents=True, exist_ok=True)
        (svg / f"{name.replace(' ', '_')}.svg").write_text(arena_svg(plan))
    row = {
        "model": name,
        "operations": len(plan.steps),
        "sum_bytes": values_alone(Inplace().run(given).program, False).total_bytes,
        "given_order_bytes": values_alone(Inplace().run(given).program, False).lower_bound,
        "reordered_bytes": values_alone(final, False).lower_bound,
        "order_proved_best": order.optimal,
        "joined_bytes": values_alone(final, True).lower_bound,
        "arena_bytes": plan.arena_bytes,
        "arena_lower_bound": plan.lower_bound,
        "greedy_by_size_bytes": greedy_by_size(plan),
        "parts_joined": sum(map(sum, plan.joins.values())),
        "parts": concatenated,
        "output_bytes": plan.output_bytes,
    }
    if name.split()[0] in PLANNED_ONLY:
        return row
    return {**row, **measured(model, inputs, final, plan, repeats)}


def measured(
    model: nn.Module, inputs: dict[str, Any], final: Program, plan: BufferPlan, repeats: int
) -> dict[str, Any]:
    """What calls of the planned program were seen to take, beside eager ones."""
    function = StaticBackend().bind(final)
    users = iter(inputs.values())
    arguments = [
        final.state[entry.name] if entry.name in final.state else next(users)
        for entry in final.inputs
        if entry.kind is not InputKind.CONSTANT
    ]
    expected = model(**inputs)
    (found,) = function(list(arguments))
    error = float((found - expected).abs().max() / expected.abs().max())
    changes = record(lambda: function(list(arguments)), torch.device("cpu")).changes
    made = sum(size for _, size in changes if size > 0)
    eager_seconds, static_seconds = best_of(repeats, lambda: model(**inputs), lambda: function(list(arguments)))
    return {
        "eager_peak_bytes": measure(lambda: model(**inputs), device="cpu").peak_bytes,
        "allocated_beside_results": made - plan.output_bytes,
        "relative_error": error,
        "eager_seconds": eager_seconds,
        "static_seconds": static_seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="*", default=(), help="names of models")
    parser.add_argument("--repeats", type=int, default=5, help="calls of which the best time is taken")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path, help="folder for a drawing of each arena")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'model':20} {'sum':>9} {'eager':>8} {'given':>8} {'order':>8} {'joined':>8} {'arena':>8} {'bound':>8} "
          f"{'greedy':>8} {'joins':>9} {'beside':>6} {'eager':>8} {'static':>8}   MB, ms")  # fmt: skip
    with torch.no_grad():
        for name, model, inputs in models(options.tiny, options.only):
            row = row_of(name, model.eval(), inputs, options.repeats, options.svg)
            rows.append(row)
            sizes = ("sum", "eager_peak", "given_order", "reordered", "joined", "arena")
            kinds = (*(f"{key}_bytes" for key in sizes), "arena_lower_bound", "greedy_by_size_bytes")
            figures = [row.get(kind) for kind in kinds]
            joins = f"{row['parts_joined']}/{row['parts']}"
            print(
                f"{name:20} "
                + " ".join(f"{'-' if figure is None else f'{figure / 1e6:.2f}':>8}" for figure in figures),
                f"{joins:>9} {row.get('allocated_beside_results', '-'):>6} {1e3 * row.get('eager_seconds', 0):8.1f}",
                f"{1e3 * row.get('static_seconds', 0):8.1f}",
                flush=True,
            )
            if options.json:
                result = {
                    "machine": platform.processor() or platform.machine(),
                    "threads": 1,
                    "torch": torch.__version__,
                    "memopt": memopt.__version__,
                    "rows": rows,
                }
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
