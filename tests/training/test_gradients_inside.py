"""Models that take gradients themselves, as those that predict forces do: planned, run eagerly, or refused."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import memopt


class Forces(nn.Module):
    """Energies and forces; in training the forces are trained as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.second(self.first(x).tanh()).sum()
            return energy, torch.autograd.grad(energy, x, create_graph=self.training)[0]


def _losses(model: nn.Module, run: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    energy, forces = run(torch.linspace(-1, 1, 24).reshape(4, 6))
    (energy + forces.square().sum()).backward()
    return [energy, forces, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("grad", [True, False])
def test_forces_of_a_model_that_is_not_trained_are_planned(grad: bool) -> None:
    model, x = Forces().eval(), torch.randn(4, 6)
    compiled = memopt.compile(model, "1GB", backend="aten")
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(compiled(x), model(x))
    assert not any("eagerly" in note for note in compiled.report.notes)


@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.long)])
def test_forces_that_are_trained_run_as_they_are(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Forces()
    compiled = memopt.compile(model, backend=backend)
    with caplog.at_level(logging.WARNING, "memopt"):
        torch.testing.assert_close(_losses(model, compiled), _losses(model, model))
    (line,) = caplog.messages
    assert "takes gradients with create_graph=True" in line
    assert "run eagerly" in line
    assert "please report" not in line


def test_forces_that_are_trained_keep_a_budget_or_are_refused() -> None:
    model = Forces()
    torch.testing.assert_close(_losses(model, memopt.compile(model, "1GB", backend="aten")), _losses(model, model))
    with pytest.raises((memopt.BudgetError, memopt.CaptureError)):
        _losses(model, memopt.compile(model, "1kB", backend="aten"))


class Penalty(nn.Module):
    """What its gradient is taken of shares the graph with what is trained."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.keep = nn.Linear(6, 6), keep

    def forward(self, x):
        y = x.detach().requires_grad_()
        return self.linear(x) * torch.autograd.grad(self.linear(y).tanh().sum(), y, retain_graph=self.keep)[0]


@pytest.mark.parametrize("keep", [True, False])
def test_a_graph_that_the_model_lets_go_of_is_refused_in_a_line(keep: bool) -> None:
    model, x = Penalty(keep), torch.randn(4, 6)
    compiled = memopt.compile(model, backend="aten")
    if keep:
        compiled(x).sum().backward()
        found = model.linear.weight.grad.clone()
        model.zero_grad()
        model(x).sum().backward()
        torch.testing.assert_close(found, model.linear.weight.grad)
    else:
        outputs = compiled(x)
        with pytest.raises(RuntimeError, match="retain_graph=True, or call the original model"):
            outputs.sum().backward()
