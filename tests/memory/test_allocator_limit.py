"""The allocator's own limit: shared among living models, given back, and never in the way of what is there."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import memopt
from memopt.memory import allocator_limit
from memopt.memory.allocator_limit import held_bytes, hold

GPU = torch.device("cuda", 0)
TOTAL = 80 * 10**9


class Owner:
    """Whoever has a budget."""


@pytest.fixture
def cuda(monkeypatch):
    """A device of 80 GB that only remembers what it was asked."""

    class Cuda:
        allocated = reserved = emptied = 0
        fraction = 1.0

        @property
        def limit(self):
            return round(self.fraction * TOTAL)

    device = Cuda()

    def empty():
        device.emptied += 1
        device.reserved = device.allocated

    class Properties:
        total_memory = TOTAL

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: device.allocated)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: device.reserved)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: device.fraction)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, index: setattr(device, "fraction", share)
    )
    monkeypatch.setattr(allocator_limit, "_devices", {})
    return device


def test_the_limit_is_the_budget_for_as_long_as_its_owner_lives(cuda):
    owner, model = Owner(), Owner()
    hold(owner, model, 8 * 10**9, 0, GPU)
    assert cuda.limit == 8 * 10**9 == held_bytes(GPU)
    del owner
    assert cuda.limit == TOTAL and held_bytes(GPU) is None


def test_owners_of_one_model_share_the_largest_and_several_models_the_sum(cuda):
    model, other = Owner(), Owner()
    first, second, third = Owner(), Owner(), Owner()
    hold(first, model, 8 * 10**9, 0, GPU)
    hold(second, model, 6 * 10**9, 0, GPU)
    assert cuda.limit == 8 * 10**9
    hold(third, other, 3 * 10**9, 0, GPU)
    assert cuda.limit == 11 * 10**9
    del first
    assert cuda.limit == 9 * 10**9
    del second, third
    assert cuda.limit == TOTAL


def test_a_smaller_claim_of_the_same_owner_changes_nothing(cuda):
    owner, model = Owner(), Owner()
    hold(owner, model, 8 * 10**9, 0, GPU)
    hold(owner, model, 2 * 10**9, 0, GPU)
    assert cuda.limit == 8 * 10**9


def test_what_belongs_to_nobody_is_allowed_on_top(cuda):
    owner, model = Owner(), Owner()
    cuda.allocated = 7 * 10**9
    hold(owner, model, 8 * 10**9, 5 * 10**9, GPU)
    assert cuda.limit == 10 * 10**9


def test_the_limit_is_not_below_what_stays_reserved_and_not_above_what_was_allowed(cuda):
    owner, model = Owner(), Owner()
    cuda.allocated, cuda.reserved, cuda.fraction = 5 * 10**9, 30 * 10**9, 0.5
    hold(owner, model, 10**9, 5 * 10**9, GPU)
    assert cuda.emptied and cuda.limit == 5 * 10**9
    hold(owner, model, 60 * 10**9, 5 * 10**9, GPU)
    assert cuda.fraction == 0.5
    del owner
    assert cuda.fraction == 0.5


def test_other_devices_are_left_alone(cuda):
    hold(Owner(), Owner(), 10**9, 0, torch.device("cpu"))
    assert cuda.limit == TOTAL and held_bytes(torch.device("cpu")) is None


def test_a_compiled_model_lets_go_when_it_dies(cuda, monkeypatch):
    asked = []
    monkeypatch.setattr("memopt.module.hold", lambda owner, model, limit, own, device: asked.append((limit, own)))
    model = nn.Linear(4, 4)
    run = memopt.compile(model, "1GB", backend="aten")
    session = run._session(False)
    run._last = session
    import dataclasses

    session.resident = dataclasses.replace(session.resident, device=GPU, inputs=64)
    monkeypatch.setattr("memopt.module.library_bytes", lambda device: 1000)
    session.hold(10**9)
    assert asked == [(10**9, 1064)]
    del run
    gc.collect()
    session.hold(10**9)
    assert len(asked) == 1


def test_plans_without_a_budget_or_for_another_device_hold_nothing(monkeypatch):
    held = []
    monkeypatch.setattr("memopt.module._hold", lambda owner, limit: held.append(limit))
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.ones(4, 8)
    memopt.plan(model, x)
    memopt.plan(model, x, "1GB", device="h100")
    assert held == []
    torch._dynamo.reset()
    memopt.plan(model, x, "1GB")
    assert held == [10**9]


class Blocks(nn.Module):
    """Blocks with temporaries of many sizes, as a U-Net's: what was freed fits the next tensor badly."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, width + 384 * (n % 5)) for n in range(12))
        self.down = nn.ModuleList(nn.Linear(width + 384 * (n % 5), width) for n in range(12))

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(x)).tanh())
        return x.square().mean()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_what_is_reserved_stays_within_the_budget(backend):
    torch._dynamo.reset()
    model = Blocks().cuda()
    x = torch.randn(8192, 1024, device="cuda")
    free = memopt.plan(model, x)
    budget = int(free.minimum_bytes + 0.4 * (free.unconstrained_bytes - free.minimum_bytes))
    model(x).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    before = torch.cuda.get_per_process_memory_fraction()
    spare = sum(gradient.nbytes for gradient in expected)  # beside the model's own: what belongs to nobody
    run = memopt.compile(model, budget, backend=backend)
    for _ in range(3):
        run(x).backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert (parameter.grad - gradient).norm() <= 1e-2 * gradient.norm()
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
    run(x).backward()
    allowed = held_bytes(torch.device("cuda", 0))
    assert budget <= allowed <= budget + spare + 2**26
    assert torch.cuda.max_memory_reserved() <= allowed
    del run
    torch._dynamo.reset()
    gc.collect()
    assert torch.cuda.get_per_process_memory_fraction() == before


@pytest.mark.gpu
def test_an_allocation_beyond_the_limit_fails_and_what_is_cached_is_given_back_first():
    torch.cuda.empty_cache()
    owner, model = Owner(), Owner()
    base = torch.cuda.memory_allocated()
    hold(owner, model, base + 2**28, base, torch.device("cuda", 0))
    cached = torch.empty(200 * 2**20, dtype=torch.uint8, device="cuda")
    del cached
    pieces = [torch.empty(60 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(3)]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**28, dtype=torch.uint8, device="cuda")
    del pieces, owner
    torch.empty(2**28, dtype=torch.uint8, device="cuda")
