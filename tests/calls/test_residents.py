"""What is resident in the calls of one model."""

import torch
from torch import nn

import memopt
from memopt.calls.guard_fast_path import Kind


def test_gradients_and_optimizers_are_counted_by_kind_of_call():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    run = memopt.compile(model, "1GB", backend="aten", optimizer=torch.optim.Adam(model.parameters()))
    residents, weights = run._memopt.residents, sum(p.nbytes for p in model.parameters())
    residents.count_optimizers()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plain, added = (residents.of((x,), {}, Kind(True, accumulating)) for accumulating in (False, True))
    assert (plain.parameters, plain.inputs, plain.gradients) == (weights, x.nbytes, 0)
    assert added.gradients == weights
    assert plain.optimizer_state >= 2 * weights
