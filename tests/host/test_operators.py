"""Copies to the host and back as operators: what they return, and on which device a graph has it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memopt.host.operators import ARRIVED, FETCH, LANDED, TO_HOST

CPU = torch.device("cpu")


@pytest.mark.parametrize("value", [torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(6) > 0])
def test_a_value_comes_back_as_it_was(value):
    held = TO_HOST(value)
    assert held.data_ptr() != value.data_ptr() and LANDED(value, held) is held
    found = FETCH(held, CPU)
    assert ARRIVED(found, held) is found and found.data_ptr() != held.data_ptr()
    assert torch.equal(found, value) and found.stride() == value.stride()


def test_what_stands_for_it_in_a_graph():
    with FakeTensorMode():
        value = torch.empty_strided((2, 3), (1, 2), dtype=torch.bfloat16, device="cuda:0")
        held = TO_HOST(value)
        assert held.device == CPU and held.stride() == (1, 2) and held.dtype is torch.bfloat16
        assert LANDED(value, held) is held
        found = FETCH(held, value.device)
        assert found.device == value.device and found.stride() == (1, 2) and ARRIVED(found, held) is found


@pytest.mark.gpu
@pytest.mark.parametrize("strides", [(512, 1), (1, 4096)])
def test_on_a_gpu_copies_run_beside_what_computes(strides):
    device = torch.device("cuda", torch.cuda.current_device())
    value = torch.empty_strided((4096, 512), strides, device=device).normal_()
    expected = value.clone()
    before = torch.cuda.memory_allocated(device)
    held = TO_HOST(value)
    assert held.is_pinned() and held.device == CPU
    held = LANDED(value, held)
    value = value.fill_(0)  # after it has landed
    found = FETCH(held, device)
    assert torch.equal(ARRIVED(found, held), expected)
    torch.cuda.synchronize()
    assert torch.equal(held, expected.cpu())
    del found
    again = FETCH(held, device)
    assert torch.equal(ARRIVED(again, held), expected), "as often as it is asked for"
    del again
    assert torch.cuda.memory_allocated(device) == before


@pytest.mark.gpu
def test_on_a_gpu_steps_reuse_what_is_pinned():
    from memopt.host.buffers import buffers_of

    device = torch.device("cuda", torch.cuda.current_device())
    pool = buffers_of(device)
    pool.release()
    before = pool.pinned_bytes
    for step in range(4):  # no step waits for the one before
        values = [torch.full((2**20,), float(4 * step + part), device=device) for part in range(3)]
        held = [LANDED(value, TO_HOST(value)) for value in values]
        del values
        found = [ARRIVED(FETCH(item, device), item) for item in held]
        assert [float(value.sum()) / 2**20 for value in found] == [4 * step + part for part in range(3)]
        del held, found
    assert pool.pinned_bytes - before == 3 * 2**22
    pool.release()
    assert pool.pinned_bytes == before
