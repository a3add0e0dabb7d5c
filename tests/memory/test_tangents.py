"""The gradients with which backward begins are inside the budget, where the caller computes the loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.tangents import Tangents, tangents_of


class Pair(nn.Module):
    """Returns what its first graph computes beside what its second does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).sin()
        torch._dynamo.graph_break()
        return hidden, self.second(hidden.cos())


def test_outputs_of_earlier_nodes_have_gradients_beside_later_ones() -> None:
    x = torch.ones(8, 4, requires_grad=True)
    early = x * 2
    late = (early[:, :2] * 3).flatten()
    found = tangents_of([early, late])
    assert found == Tangents(
        early=8 * 4 * 4, loss=(8 * 4 + 16) * 4 + 3 * 8 * 4 * 4 + 64, usual=(8 * 4 + 16) * 4 + 2 * 8 * 4 * 4 + 64
    )
    assert tangents_of([late.sum()]) == Tangents() == tangents_of([])


@pytest.mark.quick("squares")
@pytest.mark.parametrize("loss", ["squares", "entropy"])
def test_a_loss_outside_of_several_graphs_is_inside_the_budget(loss: str) -> None:
    torch.manual_seed(0)
    model, x = Pair(), torch.randn(256, 32)
    labels = torch.zeros(len(x), dtype=torch.int64)
    resident = sum(p.nbytes for p in model.parameters()) + x.nbytes

    def step(compiled: nn.Module) -> None:
        hidden, output = compiled(x)
        first = hidden.square().mean() if loss == "squares" else nn.functional.cross_entropy(hidden, labels)
        (first + output.mean()).backward()

    def compiled(budget: float | int) -> nn.Module:
        torch._dynamo.reset()
        return memopt.compile(model, budget, backend="aten")

    with pytest.raises(memopt.BudgetError) as refused:
        step(compiled(0.3))
    within = compiled(refused.value.minimum_bytes)
    step(within)
    model.zero_grad()
    peak = resident + memopt.measure(step, within).peak_bytes
    assert peak <= within.report.budget_bytes == refused.value.minimum_bytes


def test_a_refusal_names_the_output_that_a_loss_is_allowed_for() -> None:
    torch._dynamo.reset()
    with pytest.raises(memopt.BudgetError) as refused:
        memopt.plan(Head(), torch.randn(256, 8), "100kB", backend="aten")
    said = str(refused.value)
    assert "a loss of float32[256, 512] (524.29 kB, " in said and "return self.last(x.sin())) that was not seen" in said
    assert "where the loss holds nothing; one that the model's forward computes is planned with it" in said
    assert "test_tangents.py" in said


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.sin())
