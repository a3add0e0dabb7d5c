"""A model's compilation: how often its graphs are traced for the plans that are tried."""

import pytest
import torch
from torch import nn

import memopt
from memopt.backends.aten import AtenBackend


@pytest.fixture
def traced(monkeypatch):
    """The graphs that the engine was given to lower, each as often as it was."""
    found, compile_captured = [], AtenBackend.compile_captured

    def counted(self, graph_module, *rest):
        found.append(graph_module)
        return compile_captured(self, graph_module, *rest)

    monkeypatch.setattr(AtenBackend, "compile_captured", counted)
    torch._dynamo.reset()
    return found


def test_what_is_planned_with_no_loss_allowed_for_is_not_traced_again(traced):
    """A refusal is of a plan that allows for a loss, and then of one that does not: of the same trace."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 64)), torch.randn(32, 16)
    with pytest.raises(memopt.BudgetError):
        memopt.compile(model, "20kB", backend="aten")(x)
    assert len(traced) == 1
