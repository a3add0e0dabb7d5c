"""CUDA's caching allocator where torch has no public call; what of it can be asked without a device."""

import pytest
import torch

from memopt.torch_compat import cuda_memory


def test_settings_that_a_version_does_not_know_are_left_out(monkeypatch):
    asked = []

    def settings(text):
        asked.append(text)
        if "pages" in text:
            raise ValueError

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings, raising=False)
    assert cuda_memory.allocator_settings("a:True") and asked == ["a:True"]
    assert not cuda_memory.allocator_settings("a:True", pages=",pages:2") and asked[1:] == ["a:True,pages:2", "a:True"]


def test_the_history_is_kept_within_the_block_alone(monkeypatch):
    noted, traces = [], {"device_traces": [["of 0"], ["of 1"]]}
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda *args, **options: noted.append((args, options))
    )
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: traces)
    with pytest.raises(ValueError), cuda_memory.history(5) as of:
        assert of(1) == ["of 1"] and noted == [(("all",), {"context": None, "max_entries": 5})]
        raise ValueError
    assert noted[1:] == [((None,), {})]


def test_a_pool_is_left_before_its_use_is_ended(monkeypatch):
    done = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *args, name=name: done.append((name, args)), raising=False)
    cuda_memory.leave_pool(0, (1, 2))
    assert done == [("_cuda_endAllocateToPool", (0, (1, 2))), ("_cuda_releasePool", (0, (1, 2)))]


def test_a_storage_lies_on_the_memory_that_it_is_given():
    held = torch.arange(4.0)
    storage = cuda_memory.storage_of_memory(held.data_ptr() + 4, held.device, 8)
    shown = torch.empty(0).set_(storage, 0, (2,))
    held[2] = 7.0
    assert shown.tolist() == [1.0, 7.0] and storage.nbytes() == 8
    del storage, shown
    assert held.tolist() == [0.0, 1.0, 7.0, 3.0]


def test_what_a_version_lacks_does_nothing(monkeypatch):
    monkeypatch.delattr(torch._C, "_host_emptyCache", raising=False)
    monkeypatch.delattr(torch._C, "_cuda_isHistoryEnabled", raising=False)
    cuda_memory.free_host_cache()
    assert not cuda_memory.keeps_history()
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    assert cuda_memory.keeps_history()
