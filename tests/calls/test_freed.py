"""A model that is deleted is gone with all its weights, trained or refused, of one graph or of several."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import memopt

ROWS, WIDTH = 64, 16


class Broken(nn.Module):
    """Layers with something between them that is not captured; within one another, as the code of such is kept."""

    def __init__(self, depth=3, broken=True):
        super().__init__()
        self.layer, self.broken = nn.Linear(WIDTH, WIDTH), broken
        self.inner = Broken(depth - 1, broken) if depth > 1 else nn.Identity()

    def forward(self, x):
        x = self.inner(torch.relu(self.layer(x)))
        if self.broken:
            torch._dynamo.graph_break()
        return x.tanh()


@pytest.mark.quick("0.95-None-True", "1-BudgetError-False")
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(("budget", "error"), [(0.95, None), (1, memopt.BudgetError)])
def test_weights_go_with_the_model(budget, error, broken):
    def weights():
        torch.manual_seed(0)
        model = Broken(broken=broken)
        call = memopt.compile(model, budget, optimizer=torch.optim.SGD(model.parameters(), 0.1), backend="aten")
        x = torch.randn(ROWS, WIDTH)
        for _ in range(2):
            if error is None:
                call(x).sum().backward()
            else:
                with pytest.raises(error):
                    call(x)
        return [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]

    found = weights()
    for _ in range(2):  # what was refused lies in cycles around what torch frees by itself
        gc.collect()
    assert all(storage() is None for storage in found)


@pytest.mark.parametrize("budget", [None, 0.9])
def test_what_a_step_was_planned_with_is_no_garbage(budget):
    """It would stay until Python looks for cycles, which a loop of few objects does not make it do for many steps."""
    model = Broken(broken=False)
    call = memopt.compile(model, budget, optimizer=torch.optim.SGD(model.parameters(), 0.1), backend="aten")
    call(torch.randn(ROWS, WIDTH)).sum().backward()  # what loads at the first call
    for rows in (ROWS + 1, ROWS + 2):
        gc.collect()
        gc.disable()
        try:
            x = torch.randn(rows, WIDTH)
            call(x).sum().backward()
            given = weakref.ref(x.untyped_storage())
            del x
            assert given() is None
        finally:
            gc.enable()
