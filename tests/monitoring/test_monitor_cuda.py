"""A monitor on CUDA: steps by the allocator's counts, a real error of too little memory, meters beside each other."""

import pytest
import torch

import memopt
from memopt.monitoring.meters import CudaMeter
from tests.monitoring.loops import BATCH, WIDTH, trained

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
ROW = BATCH * WIDTH * 4


def test_steps_are_the_allocator_s():
    peaks = []
    with memopt.monitor() as m:
        trained(4, lambda out, loss: peaks.append(torch.cuda.memory_allocated()), device="cuda")
    last = m.steps[-1]
    assert m.device.type == "cuda" and last.held_before <= last.held_after <= last.peak <= last.reserved
    assert last.lost == last.reserved - last.peak and m.drift_bytes == 0 and m.leaks == ()
    assert {module.name for module in m.modules} >= {"layers.0.up", "layers.1"}
    assert sum(group.bytes for group in m.filled.tensors) + m.filled.unseen == m.filled.bytes


def test_kept_outputs_are_a_leak():
    kept = []
    with memopt.monitor() as m:
        trained(6, lambda out, loss: kept.append(out.detach()), device="cuda")
    (leak,) = m.leaks
    assert leak.tensors.count == 6 and leak.tensors.bytes == 6 * ROW == 6 * m.drift_bytes


def test_memory_that_runs_out_is_told_with_what_is_not_pytorch_s():
    weights = torch.nn.Linear(1024, 1024).cuda()
    with pytest.raises(torch.OutOfMemoryError) as caught, memopt.monitor(plan=False) as m:
        weights(torch.ones(2**40, device="cuda"))
    short = m.out_of_memory
    assert short.capacity == torch.cuda.get_device_properties(0).total_memory
    assert 0 < short.others < short.capacity and short.reserved >= short.filled.bytes
    assert "torch.ones(2**40" in short.line and "not PyTorch's" in caught.value.__notes__[0]


def test_the_planner_answers_on_a_device_that_ran_out():
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
    with pytest.raises(torch.OutOfMemoryError), memopt.monitor(limit="200MB") as m:
        model(torch.randn(4096, 512, device="cuda")).sum().backward()
        torch.ones(2**40, device="cuda")
    assert any(line.startswith('memopt.compile(model, budget="200MB")') for line in m.out_of_memory.fixes)


def test_a_reset_takes_no_peak_from_another_meter():
    device = torch.device("cuda", 0)
    first = CudaMeter(device)
    torch.ones(2**20, device=device)
    held = first.held()
    second = CudaMeter(device)
    try:
        assert first.most().peak >= held + 4 * 2**20 > second.most().peak
    finally:
        first.close()
        second.close()


@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_a_compiled_loop_is_measured_whole():
    torch.manual_seed(0)
    # So large that what an allocator leaves unused at least, 23 MB, is little beside it: a smaller step is refused.
    model = torch.nn.Sequential(torch.nn.Linear(512, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = memopt.compile(model, 0.9, optimizer=optimizer)
    with memopt.monitor() as m:
        for _ in range(4):
            compiled(torch.randn(8192, 512, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert m.steps[-1].peak <= compiled.report.budget_bytes and m.leaks == ()
