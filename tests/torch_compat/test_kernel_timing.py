import functools

import pytest
import torch
from torch._inductor.runtime.benchmarking import InductorBenchmarker

from memopt.memory.allocator_limit import enter, leave, limit_available_bytes
from memopt.torch_compat.kernel_timing import flush_within


@pytest.mark.parametrize(("room", "flushed"), [(None, 2**26), (2**20, 2**20), (2**30, 2**26), (0, 0)])
def test_no_more_is_flushed_than_there_is_room_for(monkeypatch, room, flushed):
    monkeypatch.setattr(InductorBenchmarker, "L2_cache_size", functools.cached_property(lambda _: 2**26))
    flush_within(lambda: room)
    assert InductorBenchmarker().L2_cache_size == flushed
    flush_within(lambda: 1)  # the first is asked from then on
    assert InductorBenchmarker().L2_cache_size == flushed


@pytest.mark.gpu
def test_a_kernel_is_timed_within_a_limit():
    values, device = torch.ones(2**20, device="cuda"), torch.device("cuda", 0)
    flush_within(limit_available_bytes)
    token = enter(device, torch.cuda.memory_reserved() + 4 * 2**20)
    try:
        assert limit_available_bytes() == 4 * 2**20
        assert InductorBenchmarker().benchmark_gpu(lambda: values.add_(1)) > 0
    finally:
        leave(token)
    assert limit_available_bytes() is None
