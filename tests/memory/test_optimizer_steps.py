"""Weights that an optimizer writes to without a new version, as fused ones do, and what was folded of them."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import memopt
from memopt.memory.optimizer_steps import stepped_since, steps_seen, watch_steps


class Raw(torch.optim.Optimizer):
    """Writes to memory itself, as libraries' kernels do."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                np.subtract(parameter.detach().numpy(), 0.1, out=parameter.detach().numpy())


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
    "raw": Raw,
}


class Net(nn.Module):
    """Its products have weights that inference folds: scaled, transposed, and normed after."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.norm(self.first(x))) @ self.second.weight.t().softmax(0).t()


@pytest.mark.quick("AdamW-aten-1MB", "SGD-static-None", "raw-aten-1MB", "Adagrad-static-None")
@pytest.mark.parametrize(
    ("name", "backend", "budget"),
    [(name, "aten", "1MB") for name in OPTIMIZERS]
    + [(name, "static", None) for name in OPTIMIZERS]
    + [("AdamW", "aten", None), ("AdamW", None, "1MB")],
)
def test_evaluation_between_steps_sees_the_weights_of_now(name, backend, budget):
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    run = memopt.compile(model, budget, backend=backend)
    x = torch.randn(5, 4, 6)
    for optimizer, trained in (
        (OPTIMIZERS[name](model.parameters()), model),
        (OPTIMIZERS[name](twin.parameters()), twin),
    ):
        trained.optimizer = optimizer
    for _ in range(3):
        for trained in (model, twin):
            trained.train()
            trained(x).square().mean().backward()
            trained.optimizer.step()
            trained.optimizer.zero_grad()
            trained.eval()
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(run(x), twin(x), rtol=1e-5, atol=1e-5)


def test_steps_are_told_by_the_memory_that_they_write_to():
    class Owner:
        pass

    owner = Owner()
    first, second, other = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    steps = watch_steps(owner)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    assert not stepped_since(steps, first.parameters())
    optimizer.step()
    assert steps_seen() == steps + 1
    assert stepped_since(steps, [first.weight]) and stepped_since(steps, [second.weight[1:]])
    assert not stepped_since(steps, other.parameters()) and not stepped_since(steps_seen(), [first.weight])
