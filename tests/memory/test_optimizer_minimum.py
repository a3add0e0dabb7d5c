"""The least that optimizers' state takes: what a step of all parameters counts, of a parameter of each kind."""

import pytest
import torch
from torch import nn, optim

from memopt.memory.optimizer import optimizer_footprint
from memopt.memory.optimizer_minimum import _EACH_ALONE, minimum_state_bytes


def model():
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.Linear(4, 2, bias=False)).requires_grad_()


@pytest.mark.parametrize("kind", _EACH_ALONE, ids=lambda kind: kind.__name__)
def test_it_is_all_of_the_state_of_torch_s_own(kind):
    net = model()
    net[1].weight.requires_grad_(False)
    settings = {"momentum": 0.9} if kind in (optim.SGD, optim.RMSprop) else {}
    groups = [{"params": list(net[:2].parameters()), "lr": 0.5}, {"params": list(net[2:].parameters())}]
    optimizer = kind(groups, lr=0.1, **settings)
    before = len(optimizer.state)
    whole = optimizer_footprint(optimizer, net.parameters()).state_bytes
    least = minimum_state_bytes([optimizer], net.parameters())
    # Adagrad has state of what is not trained, too.
    assert least == whole or (kind is optim.Adagrad and 0 < least < whole)
    assert whole > 0
    assert len(optimizer.state) == before


def test_settings_of_a_group_count():
    net = model()
    groups = [{"params": list(net[0].parameters()), "amsgrad": True}, {"params": list(net[1:].parameters())}]
    optimizer = optim.AdamW(groups)
    assert (
        minimum_state_bytes([optimizer], net.parameters())
        == optimizer_footprint(optimizer, net.parameters()).state_bytes
    )


def test_of_others_nothing_is_claimed():
    net = model()

    class Own(optim.AdamW):
        pass

    assert (
        minimum_state_bytes([Own(net.parameters()), optim.LBFGS(net.parameters()), optim.AdamW], net.parameters()) == 0
    )
    assert minimum_state_bytes([optim.AdamW([torch.ones(2, requires_grad=True)])], net.parameters()) == 0
