from __future__ import annotations

import torch
from torch import nn

import memopt
from benchmarks.xla_least import Seen, least


def test_the_largest_moment_of_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    x = torch.randn(100, 8)
    seen = Seen()
    memopt.compile(model, backend="aten", verify=False, passes=(*memopt.TRAINING, seen))(x).sum().backward()
    assert seen.program is not None
    found = least(seen.program)
    resident = 4 * (8 * 64 + 64 + 64 * 4 + 4 + 100 * 8)
    # Tanh's gradient reads its result and the gradient that arrives; the second layer's two gradients are made by then.
    assert (found.resident_bytes, found.gradients_bytes) == (resident, 4 * (64 * 4 + 4))
    assert found.operands_bytes == 2 * 4 * 100 * 64 and "tanh" in found.operator
    assert found.total_bytes == resident + 4 * 260 + 51200
