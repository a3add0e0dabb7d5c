"""Code of Inductor's draws random numbers in the model's order, whether and when they are read."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import memopt
from memopt.backends.inductor import missing_compiler

pytestmark = pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")


class Drawing(nn.Module):
    """A draw that nothing reads, of what is computed late, comes before one that is read."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("mean", torch.randn(6))
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = x + self.mean
        z = self.second(torch.tanh(self.first(x)))
        functional.dropout(y, 0.4, self.training)
        noisy = z * (torch.rand(z.shape) > 0.3)
        late = functional.dropout(y.sin(), 0.5, self.training)
        return z, noisy, functional.dropout(noisy, 0.3, self.training), late


@pytest.mark.parametrize("training", [True, False])
def test_numbers_are_drawn_in_the_model_s_order(training):
    torch._dynamo.reset()
    model, x, found = Drawing(), torch.randn(6), []
    with torch._inductor.config.patch(fallback_random=True), torch.set_grad_enabled(training):
        for run in (model, memopt.compile(model, backend="inductor", verify=False)):
            torch.manual_seed(3)
            found.append([*run(x), torch.rand(1)])
    torch.testing.assert_close(found[1], found[0])
    torch._dynamo.reset()
