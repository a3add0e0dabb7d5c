"""Operators that take functions, in inference and in training."""

import pytest
import torch
from torch import nn

import memopt


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = torch.relu(self.first(x))
        return torch.cond(h.mean() > 0.1, lambda h: self.left(h), lambda h: self.right(h), (h,))


@pytest.mark.parametrize("backend", ["aten", "static", "onnxruntime"])
def test_a_branch_in_inference_is_eager_s(backend):
    torch._dynamo.reset()
    model = Branching().eval()
    compiled = memopt.compile(model, backend=backend)
    with torch.no_grad():
        for scale in (0.0, 5.0):
            x = torch.full((4, 8), scale)
            torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-4)
    assert compiled.report.programs
