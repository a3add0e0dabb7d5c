"""What rewrites that lower the floor cost: a step's time without recomputation, by what was measured of its operators.

Beside it the same by the device's data sheet, and the operators of each set of rewrites that the two price most
differently. Nothing is compiled: a plan takes or leaves a rewrite by these figures.

python benchmarks/rewrites.py --model llama_1b --device cuda --dtype bfloat16 --batch 4 --sequence 2048
python benchmarks/rewrites.py --model gpt2 --tiny
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import fx

import memopt
from memopt.api import make_options
from memopt.calls.tracing import collect
from memopt.compilation.layout import JudgedByCost
from memopt.compilation.session import Session
from memopt.inductor.fusion import InductorFusion
from memopt.memory.cost.devices import find
from memopt.memory.cost.roofline import seconds as roofline_seconds
from memopt.memory.cost.table import CostTable, OperatorCost
from memopt.memory.resident import Resident
from memopt.pass_manager import Pass
from memopt.program import tensors_of
from memopt.step.graphs import StepGraphs
from memopt.step.option_scoring import beside
from memopt.step.planned import Planned
from memopt.step.search import StepSearch
from memopt.step.stages import judged, stages_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.building import built

_LISTED = 6  # operators


def search_of(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], table: CostTable) -> StepSearch:
    """The rewrites of a model's training step, each priced."""
    device = next(model.parameters()).device
    session = Session(
        budget=None,
        backend=make_options(backend="inductor", device=device).engine,
        passes=None,
        verify=False,
        names={},
        resident=Resident(),
        table=table,
    )
    stages = stages_of(judged(memopt.TRAINING, JudgedByCost(table)), InductorFusion(table))
    graphs = StepGraphs(list(collect(model, (), inputs, session)), stages, verify=False, table=table)
    return StepSearch(graphs, attempt=lambda planned: planned, seconds=1.0)


def sets(search: StepSearch) -> list[tuple[Pass, ...]]:
    """None of the rewrites, all that change something, and what may be used beside all."""
    used = search.all_lowering()
    return [(), *filter(None, [used, *beside(used)])]


def priced(
    items: Sequence[Planned], table: CostTable, target: str
) -> tuple[float, float, dict[str, list[tuple[float, float]]]]:
    """Seconds as measured and by data sheet, and both for each kind of operator that was measured."""
    kinds: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    measured = expected = 0.0
    for item in items:
        for node in item.program.calls:
            cost = item.costs.get(node.name, OperatorCost(0.0, 0, 0, False))
            other = roofline_seconds(node, find(target)) if cost.timed else cost.seconds
            measured, expected = measured + cost.seconds, expected + other
            if cost.timed:
                kinds[_kind(node)].append((cost.seconds, other))
    return measured, expected, kinds


def _kind(node: fx.Node) -> str:
    shapes = [list(tensor.shape) for operand in node.all_input_nodes for tensor in tensors_of(operand)]
    return f"{str(node.target).removesuffix('.default')} {' '.join(map(str, shapes))}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama_1b", choices=memopt.models.names(), metavar="MODEL")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, help="of models that read tokens")
    parser.add_argument("--resolution", type=int, help="of models that see images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--target", default="h100", help="whose data sheet: h100, a100, …")
    given = parser.parse_args()

    changes = {"tiny": True} if given.tiny else {}
    model = built(given.model, given.device, given.dtype, **changes).train()
    sizes = {name: getattr(given, name) for name in ("sequence", "resolution") if getattr(given, name) is not None}
    table = CostTable()
    search = search_of(model, model.example_inputs(given.batch, labels=True, **sizes), table)
    print(f"{given.model}, batch {given.batch}, {given.dtype}, {given.device}, torch {torch.__version__}")
    for chosen in sets(search):
        measured, expected, kinds = priced(search.unplanned(chosen), table, given.target)
        names = ", ".join(item.key for item in chosen) or "none"
        print(f"{names}: {1e3 * measured:.2f} ms as measured, {1e3 * expected:.2f} ms by data sheet")
        far = sorted(kinds.items(), key=lambda kind: -abs(sum(own - other for own, other in kind[1])))
        for name, found in far[:_LISTED]:
            own, other = (1e3 * sum(column) / len(found) for column in zip(*found, strict=True))
            print(f"  {len(found):4} of {own:8.3f} ms, {other:8.3f} by data sheet: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
