"""Calls that nothing is compiled through."""

import logging

import pytest
import torch
from torch import nn

from memopt.calls.transforms import Transformed
from memopt.capture.export import CaptureError


def test_the_model_runs_eagerly_which_is_said_once_of_each(caplog):
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    calls = Transformed(model, budgeted=False)
    with caplog.at_level(logging.INFO, "memopt"):
        for around in ("torch.func.grad", "torch.func.grad", "torch.func.vmap"):
            assert torch.equal(calls.call(around, (x,), {}), model(x))
    assert [record.getMessage().split()[2] for record in caplog.records] == ["torch.func.grad", "torch.func.vmap"]


def test_a_budget_is_not_kept_there_and_the_way_out_is_named():
    with pytest.raises(CaptureError, match="call the original model"):
        Transformed(nn.Linear(2, 2), budgeted=True).call("torch.func.grad", (torch.ones(1, 2),), {})
