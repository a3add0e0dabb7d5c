import torch
from torch import nn

import memopt
from memopt.report.scalars import scalars


def test_memory_and_plan_are_numbers_by_name():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    compiled = memopt.compile(model, "1MB", backend="aten")
    compiled(torch.ones(4, 8)).sum().backward()
    found = scalars(compiled.report)
    assert found["budget_bytes"] == 1e6 and found["predicted_peak_bytes"] == compiled.report.peak_bytes
    assert all(isinstance(value, float) for value in found.values())
    assert "budget_bytes" not in scalars(memopt.plan(model, torch.ones(4, 8), None, backend="aten"))
