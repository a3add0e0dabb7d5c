"""What an allocator takes for a request: exact on the CPU, whole blocks of 512 bytes on CUDA."""

from __future__ import annotations

import pytest
import torch

from memopt.memory.rounding import allocated_bytes


@pytest.mark.parametrize(
    ("size", "taken"), [(0, 0), (1, 512), (511, 512), (512, 512), (513, 1024), (10**9 + 1, 1_000_000_512)]
)
def test_requests(size, taken) -> None:
    assert allocated_bytes(size, torch.device("cuda", 1)) == taken
    assert allocated_bytes(size, torch.device("cpu")) == size


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_real_allocator() -> None:
    for size in (1, 512, 513, 5000):
        before = torch.cuda.memory_allocated()
        held = torch.empty(size, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() - before == allocated_bytes(size, held.device)
        del held
