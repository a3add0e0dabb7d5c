"""What a call has to do with its model's training."""

import pytest
import torch
from torch import nn

import memopt
from memopt.module import calls_of
from memopt.step.call_role import CallRole, role_of


@pytest.mark.parametrize("likely", [False, True])
@pytest.mark.parametrize("certain", [False, True])
def test_a_call_with_gradients_trains_and_one_without_may_lie_beside_training(likely, certain):
    model = nn.Linear(2, 2)
    assert role_of(model, gradients=True, likely=likely, certain=certain) == CallRole(trains=True)
    assert role_of(model, gradients=False, likely=likely, certain=certain) == CallRole(False, likely, certain)


@pytest.mark.parametrize("gradients", [False, True])
def test_nothing_is_trained_of_a_frozen_model(gradients):
    model = nn.Linear(2, 2).requires_grad_(False)
    assert role_of(model, gradients=gradients, likely=True, certain=True) == CallRole()


def test_the_session_of_a_call_knows_its_role():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run, x = memopt.compile(model, backend="aten", optimizer=optimizer), torch.randn(3, 4)
    run(x).sum().backward()
    assert calls_of(run).last.role == CallRole(trains=True)
    with torch.no_grad():
        run(x)
    assert calls_of(run).last.role == CallRole(to_be_trained=True, trained_beside=True)
    run(x).sum().backward()
    assert calls_of(run).last.role == CallRole(trains=True)
