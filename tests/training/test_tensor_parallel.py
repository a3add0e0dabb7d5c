"""Tensor-parallel models (DTensor parameters), in a world of one process: eager's numbers and gradients within a budget."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from memopt.memory.addresses import addresses
from memopt.memory.fingerprint import fingerprint_of, same_fingerprint
from tests.support import assert_same

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


@pytest.fixture
def mesh() -> Iterator[object]:
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def parallel(mesh, *, sharded: bool) -> nn.Module:
    """Two blocks and a head, whose result is a shard if `sharded`."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(16, 32))
    plan = {f"{at}.{name}": way() for at in (0, 1) for name, way in (("up", ColwiseParallel), ("down", RowwiseParallel))}
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
    assert "run as they are" not in caplog.text


def test_a_shard_that_is_moved_or_written_to_is_noticed(mesh) -> None:
    model = parallel(mesh, sharded=False)
    shard, before, place = model[0].up.weight, fingerprint_of(model[0].up.weight), addresses(model)
    assert same_fingerprint(before, fingerprint_of(shard)) and addresses(model) == place
    shard.to_local().data.mul_(2)
    assert not same_fingerprint(before, fingerprint_of(shard)) and addresses(model) == place
    model.double()
    assert [where for where, *_ in addresses(model)] != [where for where, *_ in place]
