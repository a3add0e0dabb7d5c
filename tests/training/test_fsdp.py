"""FSDP2 over two gloo processes: the parameters of one process after five steps, and a refusal that ends both ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.training.two_ranks import found_by

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

WORKER = """
import sys
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import memopt
from tests.training.test_fsdp import made
from tests.training.two_ranks import begin, tell

rank = begin()
batch = torch.randn(5, 1024, 32, generator=torch.Generator().manual_seed(0))
own = slice(512 * rank, 512 * rank + 512)

def train(kind, run, model, rows):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if run is None:
        budget = {"refused": "20kB" if rank else 0.8}.get(kind, 0.8)
        run = memopt.compile(model, budget, optimizer=optimizer, backend="aten")
    for x in batch:
        found = run(x[rows])  # its loss, unless nothing calls the layers but torch's own class
        (found.float().square().mean() if found.dim() else found).backward()
        optimizer.step()
        optimizer.zero_grad()
    return run

def sharded(kind):
    model, mesh = made(kind), init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if kind == "bf16" else MixedPrecisionPolicy()
    if kind != "root":
        for block in list(model if kind == "layers" else model.blocks)[:4]:
            fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model

def found_of(kind):
    torch._dynamo.reset()
    model = sharded(kind)
    try:
        report = train(kind, None, model, own).report
    except memopt.BudgetError as error:
        return {"refused": str(error)}
    found = {"budget": report.budget_bytes, "peak": report.peak_bytes, "total": report.breakdown.total,
             "parameters": report.breakdown.parameters, "state": report.breakdown.optimizer_state}
    twin = sharded(kind) if kind == "bf16" else made(kind)
    train(kind, twin, twin, own if kind == "bf16" else slice(None))
    whole = [p.full_tensor() for p in model.parameters()]
    twins = [p.full_tensor() if kind == "bf16" else p for p in twin.parameters()]
    found["apart"] = max((a - b).abs().max().item() for a, b in zip(whole, twins, strict=True))
    found["moved"] = max((a - b).abs().max().item() for a, b in zip(whole, made(kind).parameters(), strict=True))
    return found

found = [found_of(kind) for kind in sys.argv[3:]]
tell(found)
"""


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 128), torch.nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(torch.nn.Module):
    """Blocks, and parameters of the root's own; the same ones whenever it is made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks, self.head = torch.nn.ModuleList(Block() for _ in range(4)), torch.nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


class Layers(Net):
    """As many parameters in modules of torch's own classes alone, one of which calls the others."""

    def __init__(self) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.blocks = torch.nn.Sequential(
            *(torch.nn.Sequential(linear(32, 128), torch.nn.GELU(), linear(128, 32)) for _ in range(4))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)).float().square().mean()


def made(kind: str) -> torch.nn.Module:
    """The model of a case; the same one whenever it is made."""
    if kind == "layers":
        parts = Layers()
        return torch.nn.Sequential(*parts.blocks, parts.head)
    return Layers() if kind == "sequential" else Net()


# What `make test` asks, of one pair of processes: each takes five seconds to begin.
QUICK = ("blocks", "sequential", "bf16", "refused")


@pytest.fixture(scope="module")
def found_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict]]:
    return found_by(WORKER, tmp_path_factory, QUICK)


LONG = ("root", "layers")


@pytest.mark.parametrize("kind", [*QUICK[:3], *(pytest.param(kind, marks=pytest.mark.long) for kind in LONG)])
def test_parameters_are_those_of_one_process_and_shards_are_counted(kind, found_of):
    whole = sum(parameter.nbytes for parameter in Net().parameters())
    for found in found_of(kind):
        assert found["moved"] > 0.01
        assert found["apart"] < (2e-2 if kind == "bf16" else 1e-6)
        assert found["peak"] <= found["budget"] and found["peak"] == found["total"]
        assert found["parameters"] == pytest.approx(whole / 2, rel=0.02) == found["state"]


def test_a_refusal_of_one_rank_ends_both(found_of):
    first, second = found_of("refused")
    assert second["refused"].startswith("no plan fits the budget of 20.00 kB")
    assert first["refused"].startswith("no plan fits the budget of another rank: rank 1 needs ")
