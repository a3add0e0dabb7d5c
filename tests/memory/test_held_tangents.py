"""Gradients that autograd holds to the end of backward, zeros of outputs that no loss has used among them, are counted.

A loss's own is one of them on every torch: what is predicted is never less than what a step takes.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt
from memopt.memory.measure import measure
from tests.inductor.test_peak_lower_bound import needs_compiler


class Deep(nn.Module):
    """Returns a loss and logits, whose gradient is read before the large values of its first layers come back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 64))
        self.head = nn.Linear(64, 1024)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.wide(x).tanh())
        return logits.logsumexp(-1).mean(), logits


@pytest.mark.quick("aten")
@pytest.mark.parametrize("engine", ["aten", pytest.param("inductor", marks=needs_compiler)])
def test_a_step_takes_no_more_than_is_predicted(engine: str) -> None:
    model, x = Deep(), torch.randn(256, 64)
    compiled = memopt.compile(model, backend=engine)

    def step() -> None:
        loss, logits = compiled(x)  # which stay, as a plan counts them
        loss.backward()
        del logits

    step()
    model.zero_grad()
    before = sum(value.nbytes for value in (*model.parameters(), x))
    taken = before + measure(step, device="cpu").peak_bytes
    assert taken <= compiled.report.peak_bytes + 1024
