"""A `random.Random` of the user's own is drawn from in each call, and not once for all in the trace."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch._dynamo.variables import builder

import memopt
from memopt.torch_compat.random_objects import own_random_objects

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.random = nn.Linear(8, 8), random.Random(3)

    def forward(self, x):
        return self.layer(x) * (1 + self.random.random()) + self.random.randint(0, 9)


class Seeded(nn.Linear):
    def forward(self, x):
        return super().forward(x) * random.Random(5).random()


def _calls(kind, make):
    torch.manual_seed(0)
    run = make(kind(8, 8) if kind is Seeded else kind())
    return [run(torch.ones(4, 8)).detach() for _ in range(3)]


@pytest.mark.parametrize("kind", [Noisy, Seeded])
def test_each_call_draws_its_own(kind) -> None:
    found = _calls(kind, lambda model: memopt.compile(model, backend="aten"))
    torch.testing.assert_close(found, _calls(kind, lambda model: model))


def test_elsewhere_tracing_is_as_ever() -> None:
    own = random.Random()
    with own_random_objects():
        assert not builder.RandomVariable.is_supported_random_obj(own)
    assert builder.RandomVariable.is_supported_random_obj(own)
