"""The allocator's own limit: in force in steps only, given back, and never in the way of what others hold."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from torch import nn

import memopt
from memopt.memory import allocator_limit
from memopt.memory.allocator import page_bytes, pooled_bytes
from memopt.memory.allocator_limit import (
    Allowance,
    Held,
    enter,
    grow,
    held_bytes,
    held_now,
    leave,
    lifted,
    limit_available_bytes,
    limit_leaves,
)

GPU = torch.device("cuda", 0)
TOTAL = 80 * 10**9


@pytest.fixture
def cuda(monkeypatch):
    """A device of 80 GB that only remembers what it was asked."""

    class Cuda:
        allocated = reserved = 0
        fraction = 1.0

        @property
        def limit(self):
            return round(self.fraction * TOTAL)

    device = Cuda()

    class Properties:
        total_memory = TOTAL

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def counts(index):
        held = {"allocated_bytes": device.allocated, "reserved_bytes": device.reserved}
        return {name: {"all": {"current": size}} for name, size in held.items()}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", counts)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: device.fraction)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, index: setattr(device, "fraction", share)
    )
    monkeypatch.setattr(allocator_limit, "_devices", {})
    monkeypatch.setattr(allocator_limit, "_lifted", Counter())
    return device


def test_a_limit_leaves_room_beside_what_is_reserved(cuda):
    assert limit_available_bytes() is None
    token = enter(GPU, cuda.reserved + 5)
    assert limit_available_bytes() == 5 and limit_leaves(5) and not limit_leaves(6) and not limit_leaves(None)
    cuda.reserved += 6
    with lifted(GPU):
        assert limit_available_bytes() == 0
    leave(token)
    assert limit_available_bytes() is None and limit_leaves(None) and limit_leaves(TOTAL)


def test_what_is_cached_is_handed_back_before_there_is_no_room(cuda, monkeypatch):
    cuda.reserved = 7
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(cuda, "reserved", 3))
    token = enter(GPU, 10)
    assert limit_leaves(3) and cuda.reserved == 7
    assert limit_leaves(7) and cuda.reserved == 3
    assert not limit_leaves(8)
    leave(token)


def test_a_limit_is_in_force_until_it_is_left(cuda):
    token = enter(GPU, 8 * 10**9)
    assert cuda.limit == 8 * 10**9 == held_bytes(GPU)
    leave(token)
    assert cuda.limit == TOTAL and held_bytes(GPU) is None
    leave(token)
    assert cuda.limit == TOTAL


def test_of_several_limits_the_largest_is_in_force(cuda):
    first, second = enter(GPU, 8 * 10**9), enter(GPU, 6 * 10**9)
    assert cuda.limit == 8 * 10**9
    leave(first)
    assert cuda.limit == 6 * 10**9
    leave(second)
    assert cuda.limit == TOTAL


def test_what_the_process_was_allowed_before_is_never_exceeded_and_comes_back(cuda):
    cuda.fraction = 0.5
    token = enter(GPU, 60 * 10**9)
    assert cuda.fraction == 0.5
    with lifted(GPU):
        assert cuda.fraction == 0.5
    leave(token)
    assert cuda.fraction == 0.5


def test_a_limit_can_be_lifted_for_a_while(cuda):
    token = enter(GPU, 10**9)
    with pytest.raises(RuntimeError), lifted(GPU):
        assert cuda.limit == TOTAL and held_bytes(GPU) == 10**9
        raise RuntimeError
    assert cuda.limit == 10**9
    leave(token)
    with lifted(GPU):
        assert cuda.limit == TOTAL


def test_a_limit_that_is_lifted_twice_is_in_force_once_both_are_left(cuda):
    token = enter(GPU, 10**9)
    with lifted(GPU):
        with lifted(GPU):
            assert cuda.limit == TOTAL
        assert cuda.limit == TOTAL
        second = enter(GPU, 2 * 10**9)
        assert cuda.limit == TOTAL and held_bytes(GPU) == 2 * 10**9
    assert cuda.limit == 2 * 10**9
    leave(second)
    assert cuda.limit == 10**9
    leave(token)
    assert cuda.limit == TOTAL


def test_other_devices_have_no_limit(cuda):
    cpu = torch.device("cpu")
    with lifted(cpu):
        assert held_bytes(cpu) is None


def test_where_segments_grow_page_by_page_the_last_page_stays_within_the_limit():
    whole, by_pages = (Allowance(GPU, 10**9, 100, 100, page_bytes=page) for page in (0, 2**20))
    for held in (Held(100, 100), Held(5000, 5000)):
        assert by_pages.limit(held) == whole.limit(held) - 2**20


def test_what_belongs_to_others_is_allowed_on_top(cuda):
    allowance = Allowance(GPU, 8 * 10**9, 7 * 10**9, 5 * 10**9, coming_bytes=10**9)
    cuda.allocated = 7 * 10**9
    assert allowance.limit(held_now(GPU)) == 10 * 10**9
    cuda.allocated = 8 * 10**9  # the optimizer's state has come: the budget counts it
    assert allowance.limit(held_now(GPU)) == 10 * 10**9
    cuda.allocated = 9 * 10**9  # something else came
    assert allowance.limit(held_now(GPU)) == 11 * 10**9
    cuda.allocated = 3 * 10**9
    assert allowance.limit(held_now(GPU)) == 10 * 10**9


def test_what_others_graphs_keep_is_allowed_on_top(cuda, monkeypatch):
    def segment(device, pool, total, allocated):
        return {"device": device, "segment_pool_id": pool, "total_size": total, "allocated_size": allocated}

    there = [segment(0, (0, 0), 900, 500), segment(0, (0, 3), 400, 30), segment(0, [1, 0], 20, 0)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [*there, segment(1, (0, 4), 7, 0)])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert pooled_bytes(GPU) == 390
    cuda.allocated = 5000
    assert Allowance(GPU, 8000, 5000, 5000, pooled_bytes=390).limit(held_now(GPU)) == 8390


def test_what_the_budget_counts_and_was_not_there_yet_does_not_raise_the_limit(cuda):
    allowance = Allowance(GPU, 8000, allocated_bytes=5000, own_bytes=5065, coming_bytes=100)
    for allocated, expected in ((5000, 8000), (5065, 8000), (5165, 8000), (5175, 8010)):
        cuda.allocated = allocated
        assert allowance.limit(held_now(GPU)) == expected


def test_what_a_step_will_hold_is_what_is_there_what_is_to_come_and_its_own(cuda):
    allowance = Allowance(GPU, 8 * 10**9, 7 * 10**9, 5 * 10**9, coming_bytes=10**9)
    cuda.allocated = 7 * 10**9
    assert allowance.expected(held_now(GPU), 100) == 8 * 10**9 + 100
    cuda.allocated = 8 * 10**9  # the optimizer's state has come
    assert allowance.expected(held_now(GPU), 100) == 8 * 10**9 + 100


@pytest.mark.parametrize(
    ("allocated", "reserved", "grows"),
    [
        (10**9, 10**9 + 2**20, True),  # nothing is cached
        (10**9, 10**9 + 2**28, False),  # a step ran already
        (2 * 10**9, 10**9 + 2**30, False),  # more than that is held
    ],
)
def test_the_cache_grows_at_once_where_there_is_none(cuda, monkeypatch, allocated, reserved, grows):
    cuda.allocated, cuda.reserved = allocated, reserved
    asked = []
    monkeypatch.setattr(torch, "empty", lambda size, **options: asked.append(size))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    grow(GPU, 10**9 + 2**30)
    assert asked == []  # segments that do not expand
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert grow(GPU, 10**9 + 2**30, held_now(GPU)) is grows
    assert asked == ([(2**30 - 2**20) // page_bytes() * page_bytes()] if grows else [])


def test_pieces_that_are_cached_are_handed_back_before_the_cache_grows(cuda, monkeypatch):
    cuda.allocated, cuda.reserved = 10**9, 10**9 + 2**28
    asked = []

    def hand_back():
        asked.append("all back")
        cuda.reserved = cuda.allocated

    monkeypatch.setattr(torch, "empty", lambda size, **options: asked.append(size))
    monkeypatch.setattr(torch.cuda, "empty_cache", hand_back)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    grow(GPU, 10**9 + 2**27, in_pieces=True)
    assert asked == [], "it holds as much"
    grow(GPU, 10**9 + 2**30, in_pieces=True)
    assert asked == ["all back", 2**30 // page_bytes() * page_bytes()]


def test_a_cache_that_others_had_handed_back_is_told_from_what_the_allocator_did_at_its_limit():
    before = Held(10, 2**30, 3)
    assert Held(10, 2**29, 3).handed_back_since(before)
    assert not Held(10, 2**29, 4).handed_back_since(before)
    assert not Held(10, 2**30 - 2**20, 3).handed_back_since(before), "pages are counted whole"
    assert not Held(10, 2**29, 3).handed_back_since(None)


def test_libraries_give_up_their_buffers_before_the_cache_grows_anew(cuda, monkeypatch):
    cuda.allocated, cuda.reserved = 10**9, 10**9 + 2**26
    asked = []

    def hand_back():
        cuda.allocated, cuda.reserved = 10**9 - 2**25, 10**9

    monkeypatch.setattr(torch, "empty", lambda size, **options: asked.append(size))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: asked.append("libraries"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", hand_back)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    grow(GPU, 10**9 + 2**30, anew=True)
    assert asked == ["libraries", 2**30 // page_bytes() * page_bytes()]
    grow(GPU, 10**9, anew=True)
    assert len(asked) == 2, "nothing is missing"


@pytest.mark.gpu
def test_a_step_that_uses_all_of_its_budget_runs_after_the_cache_was_handed_back():
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    model, x = Blocks().cuda(), torch.randn(8192, 1024, device="cuda")
    plain = memopt.compile(model, "60GB", backend="inductor")
    plain(x).backward()
    model.zero_grad()
    torch._dynamo.reset()
    compiled = memopt.compile(model, int(1.005 * plain.report.peak_bytes), backend="inductor")
    for number in range(6):
        compiled(x).backward()
        if number % 2:
            model.zero_grad()  # else it is handed back around gradients, which are gone then
        gc.collect()
        torch.cuda.empty_cache()  # what libraries keep lies where the step's tensors lay
        model.zero_grad()


def test_memory_that_is_short_for_the_cache_is_left_to_the_step(cuda, monkeypatch):
    def full(size, **options):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", full)
    assert not grow(GPU, 10**9)
    assert cuda.limit == TOTAL


class Blocks(nn.Module):
    """Blocks with temporaries of many sizes, as a U-Net's: what was freed fits the next tensor badly."""

    def __init__(self, width: int = 1024, count: int = 5) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, width + 384 * (n % 5)) for n in range(count))
        self.down = nn.ModuleList(nn.Linear(width + 384 * (n % 5), width) for n in range(count))

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(x)).tanh())
        return x.square().mean()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_what_is_reserved_stays_within_the_budget(backend):
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    model = Blocks().cuda()
    x = torch.randn(8192, 1024, device="cuda")
    device = torch.device("cuda", torch.cuda.current_device())
    others = torch.cuda.memory_allocated() - sum(p.nbytes for p in model.parameters()) - x.nbytes
    before = torch.cuda.get_per_process_memory_fraction()
    run = memopt.compile(model, 0.7, backend=backend)
    run(x).backward()
    budget = run.report.budget_bytes
    assert torch.cuda.get_per_process_memory_fraction() == before and held_bytes(device) is None
    model.zero_grad()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        run(x).backward()
        model.zero_grad()
    assert torch.cuda.max_memory_reserved() <= budget + max(0, others) + 2**21
    assert torch.cuda.get_per_process_memory_fraction() == before


@pytest.mark.gpu
def test_an_allocation_beyond_the_limit_fails_and_what_is_cached_is_given_back_first():
    gc.collect()
    torch.cuda.empty_cache()
    token = enter(torch.device("cuda"), torch.cuda.memory_reserved() + 2**28)
    try:
        cached = torch.empty(200 * 2**20, dtype=torch.uint8, device="cuda")
        del cached
        pieces = [torch.empty(60 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(3)]
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**28, dtype=torch.uint8, device="cuda")
        del pieces
    finally:
        leave(token)
    torch.empty(2**28, dtype=torch.uint8, device="cuda")
