"""What makes an optimizer or leads to one counts as that."""

import functools
import types

import pytest
import torch

from memopt.memory.optimizers import count, listed
from tests.memory.test_optimizers import Pair, adamw, model, real, step


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        functools.partial(torch.optim.AdamW, lr=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        lambda parameters: Pair([torch.optim.AdamW(parameters)]),
    ],
)
def test_what_makes_one_counts_as_what_it_makes(make):
    net = model()
    found = count(listed(make), net.parameters()).footprint
    expected = count([adamw(net)], net.parameters()).footprint
    assert found == expected


class Opaque:
    """Steps another one, and says nothing of its parameters."""

    def __init__(self, optimizer):
        self.inside = [optimizer]

    def step(self):
        self.inside[0].step()


class Factory:
    """Makes one, and is an object."""

    def __call__(self, parameters):
        return torch.optim.AdamW(parameters)


def scheduled(optimizer):
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [constant, scheduler(optimizer)], [1])


def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


HOLD = {
    "a scheduler": scheduler,
    "a scheduler of schedulers": scheduled,
    "beside its scheduler": lambda optimizer: [optimizer, scheduler(optimizer)],
    "Lightning's lists": lambda optimizer: ([optimizer], [scheduler(optimizer)]),
    "Lightning's dictionary": lambda optimizer: {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler(optimizer), "interval": "step", "frequency": 1, "monitor": None},
    },
    "an opaque wrapper": Opaque,
    "one in another": lambda optimizer: Opaque(Opaque(optimizer)),
    "a namespace": lambda optimizer: types.SimpleNamespace(adam=optimizer),
    "a wrapper beside what it wraps": lambda optimizer: [Pair([optimizer]), optimizer],
    "an object that makes one": lambda optimizer: Factory(),
}


@pytest.mark.filterwarnings("ignore:.*epoch parameter:UserWarning")  # of torch's own SequentialLR
@pytest.mark.parametrize("kind", HOLD)
def test_what_leads_to_one_counts_as_that_and_once(kind):
    net = model()
    optimizer = adamw(net)
    found = count(listed(HOLD[kind](optimizer)), net.parameters())
    step(net, [optimizer])
    assert found.later == () and found.footprint.state_bytes == real(net, [optimizer])
