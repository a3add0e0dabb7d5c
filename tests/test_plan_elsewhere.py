"""memopt.plan for devices that are not here."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

import memopt
from memopt import api
from memopt.memory.cost.devices import DEVICES
from memopt.models import build


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x):
        return F.gelu(self.layers(x)).sum()


X = torch.randn(32, 64)


def test_times_are_the_device_s_and_the_model_is_not_touched():
    model = Small()
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    optimizer = torch.optim.AdamW(model.parameters())
    fast, slow = (memopt.plan(model, X, optimizer=optimizer, device=name) for name in ("h100", "t4"))
    assert fast.curve[0].seconds < slow.curve[0].seconds
    assert fast.environment.device.startswith("NVIDIA H100") and slow.environment.device.startswith("NVIDIA T4")
    assert (fast.minimum_bytes, fast.unconstrained_bytes) == (slow.minimum_bytes, slow.unconstrained_bytes)
    assert fast.notes == () and optimizer.state == {}
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_sizes_are_those_of_its_allocator():
    model = Small()
    found = memopt.plan(model, X, optimizer=torch.optim.AdamW(model.parameters()), device="a100").breakdown
    blocks = 4 * (64 * 64 * 4 + 512)  # each bias of 256 bytes takes a block
    assert found.parameters == blocks and found.optimizer_state == 2 * blocks
    assert found.inputs == X.nbytes
    assert found.total % 512 == 0


def test_inference_and_folded_constants():
    model = build("resnet18", tiny=True).eval()
    report = memopt.plan(model, model.example_inputs(2), device="l4")
    assert report.peak_bytes % 512 == 0 and report.programs[0].kind == "inference"


def test_a_plan_made_elsewhere_says_what_does_not_fit(monkeypatch):
    tiny = dataclasses.replace(DEVICES["t4"], memory_bytes=100_000)
    monkeypatch.setattr(api, "find", lambda name: tiny)
    (note,) = memopt.plan(Small(), X, device="t4").notes
    assert note.endswith("are more than the 100.00 kB (97.66 KiB) of NVIDIA T4")


def test_what_is_refused():
    with pytest.raises(ValueError, match="unknown device 'h1000': known are b200, h200"):
        memopt.plan(Small(), X, device="h1000")
    with pytest.raises(ValueError, match="cannot be verified"):
        memopt.plan(Small(), X, device="h100", verify=True)
    with pytest.raises(ValueError, match="one of backend \"aten\", not 'static'"):
        memopt.plan(Small(), X, device="h100", backend="static")


def test_a_model_that_is_too_large_to_build_here():
    with torch.device("meta"):
        model = build("gpt2_medium", layers=2, dropout=0.0).bfloat16()
        inputs = model.example_inputs(16, labels=True, sequence=1024)
    report = memopt.plan(model, inputs, device="h100")
    assert report.breakdown.parameters == pytest.approx(2 * sum(p.numel() for p in model.parameters()), rel=1e-3)
    logits = 16 * 1024 * 50257 * 2
    assert report.unconstrained_bytes > 2 * logits
    assert report.minimum_bytes <= report.peak_bytes <= report.unconstrained_bytes < 6 * logits
    assert 0.005 < report.curve[0].seconds < 0.05


@pytest.mark.quick("unet")
@pytest.mark.parametrize("name", ["gpt2", "unet", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_rewrites_that_lower_the_floor_work_there_too(name):
    model = build(name, tiny=True).bfloat16()
    inputs = model.example_inputs(4, labels=True)
    least = memopt.plan(model, inputs, device="h100").minimum_bytes
    report = memopt.plan(model, inputs, least + 4096, device="h100")
    assert report.peak_bytes <= report.budget_bytes == least + 4096
    assert report.peak_bytes < report.unconstrained_bytes
    assert report.peak_bytes % 512 == 0
