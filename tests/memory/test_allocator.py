"""What is left to CUDA's allocator, and what libraries keep of it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memopt.memory import allocator
from memopt.memory.allocator import (
    allocated_after_gc,
    count_library_bytes,
    library_bytes,
    slack_bytes,
    stuck_bytes,
    with_slack,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("size", [1, 10**6, 999 * 10**6 - 22 * 2**20, 123_456_789, 8 * 10**9, 79 * 10**9 + 7])
def test_the_least_limit_leaves_what_is_asked_for_and_one_byte_less_does_not(size):
    limit = with_slack(size, GPU)
    assert limit - slack_bytes(limit, GPU) >= size > limit - 1 - slack_bytes(limit - 1, GPU)
    assert with_slack(size, CPU) == size and slack_bytes(size, CPU) == 0


def test_stuck_is_what_lies_beside_tensors_in_segments_that_do_not_expand(monkeypatch):
    def segment(total, allocated, *, device=0, pool=(0, 0), expands=False):
        return {"device": device, "segment_pool_id": pool, "is_expandable": expands} | {
            "total_size": total,
            "allocated_size": allocated,
        }

    others = [segment(50, 3, device=1), segment(50, 3, pool=(0, 2)), segment(50, 3, expands=True), segment(50, 0)]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [segment(64, 16), segment(8, 7), *others])
    assert stuck_bytes(GPU) == 49


def test_on_cpu_libraries_keep_nothing():
    assert library_bytes(CPU) == 0


def test_buffers_are_those_of_real_products_also_while_a_graph_is_traced(monkeypatch):
    held = [1000]

    def multiply(device):
        assert device == GPU and not isinstance(torch.zeros(2), FakeTensor)
        held[0] += 64

    monkeypatch.setattr(allocator, "_multiply", multiply)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: held[0])
    with FakeTensorMode():
        assert allocator._measured.__wrapped__(0) == 64


@pytest.mark.gpu
def test_what_is_cached_around_a_tensor_is_stuck():
    before = stuck_bytes(GPU)
    allocator._set_expandable(False)
    large = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    del large
    small = torch.empty(2**24, dtype=torch.uint8, device="cuda")  # in the same segment
    assert stuck_bytes(GPU) == before + 2**28 - 2**24
    del small
    assert stuck_bytes(GPU) == before


@pytest.mark.gpu
def test_both_threads_that_multiply_are_counted_also_where_backward_has_none_of_its_own():
    allocator._measured.cache_clear()
    found = library_bytes(GPU)
    allocator._measured.cache_clear()
    with torch.autograd.set_multithreading_enabled(False), torch.no_grad(), FakeTensorMode():  # as while torch compiles
        assert library_bytes(GPU) == found
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    weight = torch.ones(64, 64, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()
    weight.grad = None
    half = torch.ones(64, 64, device="cuda", dtype=torch.float16)
    torch.addmm(half[0], half, half)
    assert torch.cuda.memory_allocated() - before - weight.nbytes - half.nbytes == found


def test_what_libraries_were_seen_to_keep_is_counted_from_then_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(allocator, "_measured", lambda index: 1000)
    monkeypatch.setattr(allocator, "_further", {})
    count_library_bytes(torch.device("cuda"), 24)
    count_library_bytes(GPU, 6)
    assert library_bytes(GPU) == 1030 and library_bytes(torch.device("cuda", 1)) == 1000


@pytest.mark.gpu
def test_what_measuring_on_another_stream_left_is_not_there_once_settled():
    left = torch.randn(64, 64, device=GPU)
    before = allocated_after_gc(GPU)
    with torch.cuda.stream(torch.cuda.Stream()):
        left @ left
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() > before
    assert allocated_after_gc(GPU) == before


@pytest.mark.parametrize(
    ("given", "before", "during"),
    [
        ("", [True], [False]), ("", [], []), ("expandable_segments:True", [], [False]),
        ("expandable_segments:True,max_split_size_mb:64", [], []), ("expandable_segments:False", [], []),
    ],
)  # fmt: skip
def test_a_segment_of_its_own_is_taken_where_segments_grow(monkeypatch, given, before, during):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", given)
    monkeypatch.setattr(allocator, "_growth", [allocator._Growth(expands, 2**20) for expands in before])
    set_to = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", set_to.append, raising=False)
    with pytest.raises(KeyError), allocator.own_segment():
        assert [growth.expands for growth in allocator._growth] == during
        raise KeyError
    pages = "expandable_segments:True,large_segment_size_mb:12"
    assert set_to == (["expandable_segments:False", pages] if during else [])
    assert [growth.expands for growth in allocator._growth] == ([True] if during else before)


@pytest.mark.parametrize(
    ("given", "refused", "expected"),
    [
        ("", False, ["expandable_segments:True,large_segment_size_mb:12"]),
        ("expandable_segments:True", True, ["expandable_segments:True"]),
        ("expandable_segments:True,max_split_size_mb:64", False, []),
    ],
    ids=["by small pages", "of one size", "chosen otherwise"],
)
def test_segments_grow_by_small_pages_where_torch_has_them(monkeypatch, given, refused, expected):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(allocator, "_growth", [])
    set_to = []

    def settings(text):
        if refused and "large" in text:
            raise ValueError("Unrecognized key 'large_segment_size_mb'")
        set_to.append(text)

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings, raising=False)
    allocator.use_expandable_segments(GPU)
    assert set_to == expected
