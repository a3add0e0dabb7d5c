"""What planning itself takes is within the budget, though that is a fraction of a step that was not planned yet."""

import pytest
import torch
from torch import nn

import memopt
from memopt.memory.cost import table as table_module


@pytest.mark.quick("training")
@pytest.mark.parametrize("first", ["training", "inference"])
def test_the_machine_is_not_measured_where_its_measure_has_no_room(monkeypatch, tmp_path, first):
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    measured, limits = [], []
    real = table_module.measure_operators
    monkeypatch.setattr(table_module, "calibrate", lambda device: measured.append(device))
    monkeypatch.setattr(
        table_module,
        "measure_operators",
        lambda nodes, device, limit: limits.append(limit) or real(nodes, device, limit),
    )
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())])
    call, x = memopt.compile(model, 0.75, backend="aten"), torch.randn(256, 32)
    if first == "inference":
        with torch.no_grad():
            call(x)
    call(x).sum().backward()
    eager = sum(p.nbytes for p in model.parameters()) + 16 * x.nbytes
    assert measured == [] and limits and max(limits) < eager
