"""What a call takes is seen: in resident pages on a host, and in PyTorch's allocator where that is used on CUDA."""

import ctypes
import sys

import pytest
import torch

from memopt.onnxruntime import memory
from memopt.onnxruntime.memory import TorchAllocator, peak_of

MIB = 2**20
CPU = torch.device("cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="resident pages are Linux's")
def test_the_peak_of_a_call_on_a_host_is_what_it_touched_at_once():
    def touch():
        for size in (64, 16):
            torch.ones(size * MIB, dtype=torch.uint8)

    found = peak_of(touch, CPU)
    assert found is None or (found % MIB == 0 and 62 * MIB <= found <= 96 * MIB)
    nothing = peak_of(lambda: None, CPU)
    assert nothing is None or nothing <= 4 * MIB


def test_where_the_kernel_keeps_no_mark_nothing_is_said(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(memory, "Path", lambda name: tmp_path / "nowhere" / "at_all")
    assert peak_of(lambda: calls.append(1), CPU) is None
    assert not calls, "it is not run where nothing is seen"


def functions(allocator):
    names = ("gpu_external_alloc", "gpu_external_free", "gpu_external_empty_cache")
    options = allocator.options()
    assert tuple(options) == names
    kinds = (
        ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t),
        ctypes.CFUNCTYPE(None, ctypes.c_void_p),
        ctypes.CFUNCTYPE(None),
    )
    return [kind(int(options[name])) for kind, name in zip(kinds, names, strict=True)]


def test_blocks_go_through_pytorch_s_allocator_on_one_stream(monkeypatch):
    taken, freed = [], []
    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", lambda *given: taken.append(given) or 4096)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", freed.append)
    device, stream = torch.device("cuda", 0), object()
    allocator = TorchAllocator(device, stream)
    allocate, free, empty = functions(allocator)
    assert allocate(100) == 4096 and taken == [(100, device, stream)]
    assert not allocate(0) and len(taken) == 1, "nothing is taken for nothing"
    free(4096)
    free(None)
    empty()
    assert freed == [4096] and allocator.error is None


def test_memory_that_ran_out_is_an_address_of_nothing_and_is_kept_for_python(monkeypatch):
    def refuse(*given):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", refuse)
    allocator = TorchAllocator(torch.device("cuda", 0), object())
    assert functions(allocator)[0](100) is None
    assert isinstance(allocator.error, torch.OutOfMemoryError)


@pytest.mark.gpu
def test_the_peak_of_a_call_on_cuda_is_pytorch_s():
    def touch():
        torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
        torch.ones(16 * MIB, dtype=torch.uint8, device="cuda")

    held = torch.ones(8 * MIB, dtype=torch.uint8, device="cuda")
    assert peak_of(touch, torch.device("cuda")) == 64 * MIB
    assert held.numel() == 8 * MIB
