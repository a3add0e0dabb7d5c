"""Backward of a rehearsed step: from what requires gradients, whose own are not counted."""

import torch
from torch import nn

from memopt.capture.rehearsal import ledger_for, run_backward


def test_a_model_without_parameters_has_no_ledger():
    assert ledger_for(nn.ReLU()) is None


def test_backward_runs_from_all_that_has_gradients():
    model = nn.Linear(256, 256)
    ledger = ledger_for(model)
    assert ledger is not None
    with ledger:
        hidden = model(torch.ones(4, 256))
        before = ledger.peak
        run_backward({"a": hidden, "b": [hidden.detach(), 3]}, ledger)
    assert model.weight.grad is not None and torch.equal(model.bias.grad, torch.full((256,), 4.0))
    assert ledger.peak >= before + model.weight.nbytes and ledger.counting


def test_without_gradients_nothing_runs():
    model = nn.Linear(2, 2)
    ledger = ledger_for(model)
    with ledger, torch.no_grad():
        run_backward(model(torch.ones(1, 2)), ledger)
    assert model.weight.grad is None
