"""A model's compilation: how often its graphs are traced for the plans that are tried."""

import pytest
import torch
from torch import nn

import memopt
from memopt.backends.aten import AtenBackend
from memopt.inductor.forward_backward import ForwardBackward
from memopt.step.by_loss_alone import ByLossAlone
from tests.backends.conftest import _compiler

__all__ = ["_compiler"]


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


class Beside(nn.Module):
    """A model that returns a loss, and more beside it that has a gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 64)

    def forward(self, x):
        logits = self.last(self.first(x).tanh())
        return logits.square().mean(), logits


@pytest.mark.usefixtures("_compiler")
def test_no_code_is_made_of_a_plan_that_is_hopeless_where_less_may_be_planned_for(monkeypatch):
    """With the gradients of the logits nothing keeps the budget, whatever is fused: their code would be in vain."""
    happened, compile_graph, refused_before = [], ForwardBackward.compile, ByLossAlone.refused

    def compiles(self, *args, **options):
        happened.append("code")
        return compile_graph(self, *args, **options)

    def seen(self, error, **options):
        happened.append(self.stage)
        return refused_before(self, error, **options)

    monkeypatch.setattr(ForwardBackward, "compile", compiles)
    monkeypatch.setattr(ByLossAlone, "refused", seen)
    with pytest.raises(memopt.BudgetError) as refused:
        memopt.compile(Beside(), "60kB", backend="inductor")(torch.randn(64, 8))
    assert happened[0] == ("", "") and "code" in happened, "the least that is named in the end is of code"
    assert refused.value.minimum_bytes > 60_000


def test_a_minimum_is_least_where_a_loss_that_was_not_seen_has_room_beside_a_plan_that_saves_less():
    cell = nn.GRUCell(24, 64)
    given = torch.randn(64, 24), torch.zeros(64, 64)
    optimizer = torch.optim.SGD(cell.parameters(), 0.1)
    with pytest.raises(memopt.BudgetError) as refused:
        memopt.plan(cell, given, 100_000, optimizer=optimizer)
    least = refused.value.minimum_bytes
    assert "at most" not in str(refused.value)
    assert memopt.plan(cell, given, least, optimizer=optimizer).peak_bytes <= least
    with pytest.raises(memopt.BudgetError) as again:
        memopt.plan(cell, given, int(0.97 * least), optimizer=optimizer)
    assert again.value.minimum_bytes == least
