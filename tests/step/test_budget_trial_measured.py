"""What a trial step of a budget measures, and the room that is left beside it."""

from __future__ import annotations

import pytest
import torch

import memopt
from memopt.step import trial_steps
from tests.training.steps import make

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_on_cpu_no_step_is_taken(monkeypatch):
    monkeypatch.setattr(trial_steps, "take_step", None)
    model, x = make()
    memopt.compile(model, "1GB", backend="aten")(x)


@pytest.mark.gpu
def test_what_a_step_reserves_is_measured_and_kept():
    from tests.memory.test_allocator_limit import Blocks

    # Large enough for what the allocator and cuBLAS keep, 90 MB, to be a small part.
    model = Blocks(count=3).cuda()
    x = torch.randn(32768, 1024, device="cuda")
    run = memopt.compile(model, 0.7, backend="inductor")
    start = [value.clone() for value in model.parameters()]
    run(x).backward()
    measured = run.report.measured_peak_bytes
    assert measured is not None and measured <= run.report.budget_bytes
    assert all(torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))
    model.zero_grad()
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    for _ in range(3):
        run(x).backward()
        model.zero_grad()
    assert torch.cuda.memory_stats()["num_alloc_retries"] - before <= 3


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32")
@pytest.mark.parametrize("fraction", [0.9, 0.8])
def test_a_recorded_step_leaves_room_for_the_loss_and_the_optimizer(fraction):
    """A CUDA graph's memory is its own: the loss's was taken beside it, 26 MB over a budget of 552."""
    torch.cuda.empty_cache()
    model = torch.nn.Sequential(torch.nn.Linear(512, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    others = torch.cuda.memory_allocated() - sum(parameter.nbytes for parameter in model.parameters())
    run = memopt.compile(model, fraction, backend="inductor", optimizer=optimizer)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        run(torch.randn(8192, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    reserved = torch.cuda.max_memory_reserved() - others
    assert reserved <= run.report.budget_bytes, (reserved, run.report, run.report.notes)
