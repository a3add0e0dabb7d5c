"""Random numbers that are drawn after a call of a stand-in: as after the model's own call, however it was planned."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from torch import nn

import memopt
from memopt.backends.inductor import missing_compiler

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Model(nn.Module):
    def __init__(self, p, layers):
        super().__init__()
        self.layers, self.p = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers)), p

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.dropout(nn.functional.gelu(layer(x)), self.p, self.training)
        return x


def _drawn(make, p, *, training=True, gradients=True, layers=3):
    """What is drawn after each of three calls, and after it was made."""
    torch.manual_seed(0)
    model, x = Model(p, layers).train(training), torch.randn(64, 32)
    torch.manual_seed(5)
    random.seed(5)
    run = make(model, x)
    found = [(torch.random.get_rng_state().tolist(), random.getstate())]
    for _ in range(3):
        model.zero_grad()
        with torch.set_grad_enabled(gradients):
            y = run(x)
        if gradients:
            y.sum().backward()
        found.append((torch.random.get_rng_state().tolist(), random.getstate()))
    return found


WAYS = {
    "no budget": {},
    "a budget": {"budget": "85%"},
    "no proof": {"budget": "85%", "verify": False},
    "the whole proof": {"verify": "full"},
}


@pytest.mark.quick("0.3-a budget", "0.3-no proof", "0.0-no budget", "0.3-the whole proof")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_planning_leaves_the_stream_as_eager_does(way, p) -> None:
    compiled = _drawn(lambda model, x: memopt.compile(model, backend="aten", **WAYS[way]), p)
    assert compiled == _drawn(lambda model, x: model, p)


def test_planning_ahead_draws_nothing() -> None:
    made = _drawn(lambda model, x: memopt.compile(model, "85%", backend="aten", example_inputs=x), 0.3)
    assert made == _drawn(lambda model, x: model, 0.3)


@pytest.mark.parametrize("backend", ["aten", "static"])
def test_inference_leaves_the_stream_as_eager_does(backend) -> None:
    options = {"training": False, "gradients": False}
    compiled = _drawn(lambda model, x: memopt.compile(model, backend=backend), 0.3, **options)
    assert compiled == _drawn(lambda model, x: model, 0.3, **options)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_refusal_draws_nothing(gradients) -> None:
    model, x = Model(0.3, 3), torch.randn(64, 32)
    before = torch.random.get_rng_state()
    with torch.set_grad_enabled(gradients), pytest.raises(memopt.BudgetError):
        memopt.compile(model, 10, backend="aten")(x)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")
def test_generated_code_draws_as_torch_compile_does() -> None:
    expected = _drawn(lambda model, x: torch.compile(model), 0.3, layers=1)
    torch._dynamo.reset()
    assert _drawn(lambda model, x: memopt.compile(model, "100%", backend="inductor"), 0.3, layers=1) == expected


def test_importing_what_is_used_first_draws_nothing() -> None:
    code = "import random, memopt; s = random.getstate(); memopt.compile; print(s == random.getstate())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"
