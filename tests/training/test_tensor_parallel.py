"""Tensor-parallel models (DTensor parameters): eager's numbers and gradients within a budget."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from memopt.memory.addresses import addresses
from memopt.memory.distributed import groups_of
from memopt.memory.fingerprint import fingerprint_of, same_fingerprint
from tests.support import assert_same

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


class Block(nn.Module):
    """A feed-forward block with layers side by side: the gradients of what they read are summed up apart."""

    def __init__(self, beside: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 64) for _ in range(beside))
        self.down = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(sum(F.gelu(up(x)) for up in self.up))


@pytest.fixture
def mesh() -> Iterator[object]:
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def parallel(mesh, *, sharded: bool, beside: int = 1) -> nn.Module:
    """Two blocks and a head, whose result is a shard if `sharded`."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(Block(beside), Block(beside), nn.Linear(16, 32))
    plan = {f"{at}.up.*": ColwiseParallel() for at in (0, 1)} | {f"{at}.down": RowwiseParallel() for at in (0, 1)}
    head = ColwiseParallel(output_layouts=Shard(-1) if sharded else Replicate(), use_local_output=not sharded)
    return parallelize_module(model, mesh, {**plan, "2": head})


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def stepped(run: nn.Module, model: nn.Module) -> list[torch.Tensor]:
    outputs = run(torch.linspace(-1, 1, 256 * 16).reshape(256, 16))
    outputs.pow(2).mean().backward()
    assert all(type(parameter.grad) is type(parameter.data) for parameter in model.parameters())
    return [full(outputs), *(full(parameter.grad) for parameter in model.parameters())]


@pytest.mark.quick("0.8-*")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("budget", [None, 0.8])
def test_it_trains_as_in_eager(mesh, budget, sharded, caplog) -> None:
    model = parallel(mesh, sharded=sharded)
    expected = stepped(model, model)
    model.zero_grad()
    run = memopt.compile(model, budget, backend="aten")
    for actual, value in zip(stepped(run, model), expected, strict=True):
        assert_same(actual, value)
    assert "run eagerly" not in caplog.text


def test_a_shard_that_is_moved_or_written_to_is_noticed(mesh) -> None:
    model = parallel(mesh, sharded=False)
    shard, before, place = model[0].up[0].weight, fingerprint_of(model[0].up[0].weight), addresses(model)
    assert same_fingerprint(before, fingerprint_of(shard)) and addresses(model) == place
    shard.to_local().data.mul_(2)
    assert not same_fingerprint(before, fingerprint_of(shard)) and addresses(model) == place
    model.double()
    assert [where for where, *_ in addresses(model)] != [where for where, *_ in place]


def test_the_ranks_of_its_mesh_begin_together(mesh) -> None:
    groups = groups_of(parallel(mesh, sharded=False))
    assert groups == [mesh.get_group(0)] and not groups_of(nn.Linear(2, 2))


WORKER = """
import sys
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import memopt
from memopt.solve import solver_worker
from tests.support import assert_same
from tests.training.test_tensor_parallel import parallel, stepped

rank, path = int(sys.argv[1]), sys.argv[2]
search = solver_worker.curve  # as briefly as in tests, and not equally long on both ranks
solver_worker.curve = lambda problem, *, seconds: search(problem, seconds=min(seconds, 0.2 + 0.2 * rank))
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
model = parallel(mesh, sharded=True, beside=3)
expected = stepped(model, model)
model.zero_grad()
run = memopt.compile(model, 0.8, backend="aten")
for actual, value in zip(stepped(run, model), expected, strict=True):
    assert_same(actual, value)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_two_ranks_with_schedules_of_their_own_do_not_wait_for_each_other(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", WORKER, str(rank), str(tmp_path / "meeting")] for rank in range(2)]
    workers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        told = [worker.communicate(timeout=120)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], told
