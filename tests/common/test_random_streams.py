"""Python's and NumPy's random numbers: planning draws none, and a model draws what it would draw by itself."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import memopt
from memopt.common.random_streams import RandomStreams, host_state, streams_kept


def seed():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def drawn():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_streams_are_set_back():
    seed()
    before, wanted = RandomStreams(), drawn()
    drawn()
    before.restore()
    assert drawn() == wanted


def test_what_is_drawn_within_leaves_no_trace():
    seed()
    before = host_state()
    with pytest.raises(KeyError), streams_kept():
        drawn()
        raise KeyError
    found, _ = host_state() == before, seed()
    assert found
    wanted = drawn()
    seed()
    with streams_kept():
        drawn()
    assert drawn() == wanted


def array(x):
    return torch.as_tensor(np.random.rand(8) < 0.5)


def number(x):
    return torch.full((8,), float(np.random.uniform(0, 1))) > 0.5


def chosen(x):
    mask = torch.zeros(8, dtype=torch.bool)
    mask[torch.as_tensor(np.random.choice(8, 3, replace=False))] = True
    return mask


def python(x):
    return torch.full((8,), random.uniform(0, 1)) > 0.5


def branch(x):
    """As layers are dropped."""
    return x.mean(0) > 0 if np.random.uniform(0, 1) < 0.5 else x.mean(0) < 0


class Masked(nn.Module):
    def __init__(self, draw):
        super().__init__()
        torch.manual_seed(0)
        self.draw, self.first, self.second = draw, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.first(x)
        hidden = torch.where(self.draw(hidden), hidden, torch.zeros_like(hidden))
        return self.second(hidden).relu()


def steps(model, call, training):
    seed()
    found = []
    for _ in range(4):
        with torch.set_grad_enabled(training):
            output = call(torch.ones(4, 8)).sum()
        if training:
            output.backward()
        found.append(output.item())
    gradients = [parameter.grad for parameter in model.parameters()]
    return found, [g for g in gradients if g is not None], drawn()


@pytest.mark.quick(
    "array-None-training", "array-1MB-inference", "chosen-1MB-inference", "branch-1MB-inference", "python-*"
)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("budget", [None, "1MB"])
@pytest.mark.parametrize("draw", [array, number, chosen, python, branch], ids=lambda draw: draw.__name__)
def test_a_model_draws_what_it_would_by_itself(draw, budget, training):
    torch._dynamo.reset()
    model = Masked(draw)
    wanted = steps(model, model, training)
    model.zero_grad()
    found = steps(model, memopt.compile(model, budget, backend="aten"), training)
    assert found[0] == pytest.approx(wanted[0]) and found[2] == wanted[2]
    torch.testing.assert_close(found[1], wanted[1])


def test_another_stream_is_found_by_a_full_check(monkeypatch):
    """As if planning drew from Python's stream."""
    torch._dynamo.reset()
    model = Masked(python)
    compiled = memopt.compile(model, backend="aten", verify="full")
    real = compiled._memopt.planned.run

    def drawing(*args):
        random.random()
        return real(*args)

    monkeypatch.setattr(compiled._memopt.planned, "run", drawing)
    with pytest.raises(Exception, match="differ"):
        for _ in range(3):
            compiled(torch.ones(4, 8))
