"""Steps with operators whose results keep more memory in eager than their sizes say: predicted as they are measured."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from tests.training.steps import assert_equal, budget_for, gradients, peak_of

LOSSES = {
    "mse": F.mse_loss,
    "mse, summed": lambda y, t: F.mse_loss(y, t, reduction="sum") / 512,
    "smooth l1": lambda y, t: F.smooth_l1_loss(y, t, beta=0.5),
    "huber": F.huber_loss,
    "binary": lambda y, t: F.binary_cross_entropy(y.sigmoid(), t.sigmoid()),
    "soft margin": lambda y, t: F.soft_margin_loss(y, t.sign()),
    "added to": lambda y, t: F.mse_loss(y, t) + y.mean(),
}


class Net(nn.Module):
    """The loss is the largest that the model computes; without one, columns of an image that are folded again are."""

    def __init__(self, loss: str | None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 90)
        self.loss = None if loss is None else LOSSES[loss]

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x).relu())
        if self.loss is not None:
            return self.loss(y, t)
        columns = F.unfold(y.unflatten(1, (10, 9)).view(4, 10, -1, 9).tanh(), 3, padding=1)
        return (F.fold(columns.sin(), (x.shape[0] // 4, 9), 3, padding=1).flatten().sin() * t.flatten()).mean()


def made(loss: str | None) -> tuple[Net, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return Net(loss), (torch.randn(256, 8), torch.randn(256, 90))


@pytest.mark.quick("mse", "added to", "binary", "None")
@pytest.mark.parametrize("loss", [*LOSSES, None])
def test_a_step_is_predicted_as_it_is_measured_and_losses_that_are_kept_are_small(loss):
    model, given = made(loss)
    twin = copy.deepcopy(model)
    run = memopt.compile(model, budget_for(model, given, 0.5), backend="aten")
    kept: list[Any] = []

    def step(called: nn.Module) -> torch.Tensor:
        result = called(*given)
        result.backward()
        return result.detach()

    expected = step(twin), gradients(twin)
    for _ in range(3):
        model.zero_grad()
        kept.append(step(run))
    assert_equal((kept[-1], gradients(model)), expected)
    assert all(loss.untyped_storage().nbytes() == loss.nbytes for loss in kept)
    model.zero_grad()
    measured = peak_of(lambda: kept.append(step(run)), model, *given)
    assert run.report.peak_bytes == pytest.approx(measured, rel=0.002)


@pytest.mark.quick("aten-None", "static-mse")
@pytest.mark.parametrize("loss", ["mse", "binary", None])
@pytest.mark.parametrize("backend", ["aten", "static"])
def test_a_call_without_gradients_is_predicted_as_it_is_measured(backend, loss):
    model, given = made(loss)
    run = memopt.compile(model.eval(), backend=backend)
    with torch.no_grad():
        expected = model(*given)
        for _ in range(2):
            found = run(*given)
        measured = memopt.measure(run, *given, device="cpu").peak_bytes
    assert_equal(found, expected)
    assert found.untyped_storage().nbytes() == found.nbytes
    assert measured <= run.report.peak_bytes
