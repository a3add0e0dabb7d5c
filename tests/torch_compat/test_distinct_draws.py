"""Two calls on one value that draw random numbers draw two sets of them, in code of Inductor's too."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import memopt
from memopt.backends.inductor import missing_compiler

pytestmark = pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")


class Twice(nn.Module):
    """The values that are drawn of are equal only once a rewrite has merged them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        noise = y.clone().exponential_() - (y * 1).exponential_()
        return functional.rrelu(y, training=True) - functional.rrelu(y * 1, training=True), noise.detach()


def test_equal_calls_that_draw_are_not_merged():
    torch._dynamo.reset()
    model, x, found = Twice(), torch.randn(4, 6), []
    with torch._inductor.config.patch(fallback_random=True):
        for run in (model, memopt.compile(model, backend="inductor", verify=False)):
            torch.manual_seed(3)
            model.zero_grad()
            y, noise = run(x)
            y.square().sum().backward()
            found.append([y, noise, model.linear.weight.grad, torch.rand(1)])
    torch.testing.assert_close(found[1], found[0])
    torch._dynamo.reset()
