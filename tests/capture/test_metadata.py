"""What a captured graph returns is compared with what the model returns, as the model's caller has it."""

import logging

import pytest
import torch
from torch import nn

import memopt


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return x[:5], self.linear(x), x.t(), x.split(3)[0]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_views_of_inputs_with_gradients_are_those_of_eager_without_a_recording(mode, caplog):
    torch._dynamo.reset()
    model = Views()
    run = memopt.compile(model, backend="aten")
    with mode(), caplog.at_level(logging.WARNING, "memopt"):
        x = torch.randn(6, 6).requires_grad_()
        for _ in range(2):
            found, expected = run(x), model(x)
            assert [value.requires_grad for value in found] == [value.requires_grad for value in expected]
            torch.testing.assert_close(found, expected)
    assert "memopt failed" not in caplog.text
