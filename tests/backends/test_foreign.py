"""A runtime with weights of its own: loaded once, anew where a weight changed, results laid out as PyTorch's."""

from __future__ import annotations

import dataclasses
import threading

import torch
from torch import nn

from memopt.backends.foreign import ForeignFunction, ForeignWeights, laid_out, weights_of
from memopt.program import InputKind
from tests.support import capture


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x):
        return self.layer(x).t()


class Copying(ForeignFunction):
    """Stands for another runtime: computes with the weights as they were when it was loaded."""

    loads: list[str]

    def load(self, values):
        self.loads.append(threading.current_thread().name)
        weights, module = {index: values[index].detach().clone() for index in self.fixed}, self.module
        return lambda given: [
            value.contiguous() for value in module(*(weights.get(i, value) for i, value in enumerate(given)))
        ]


def foreign(model, x, weights=None):
    program = capture(model, x)
    Copying.loads = []
    rewrites = []

    def rewrite(state):
        rewrites.append(sorted(state))
        return dataclasses.replace(program, state={**program.state, **state})

    function = ForeignWeights(program, rewrite, weights_of(program) if weights is None else weights, Copying)
    known = dict(model.named_parameters())

    def call(x):
        given = [x if entry.kind is InputKind.USER else known[entry.target].detach() for entry in program.inputs]
        return function(given)[0]

    return program, rewrites, call


def test_it_loads_once_on_a_thread_of_its_own_and_gives_pytorch_s_strides():
    model, x = Model(), torch.randn(2, 3)
    _, rewrites, call = foreign(model, x)
    for _ in range(2):
        found, expected = call(x), model(x).detach()
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride() == (1, 4)
    assert len(Copying.loads) == 1 and Copying.loads[0] != threading.current_thread().name
    assert not rewrites


def test_a_weight_that_changed_is_loaded_anew():
    model, x = Model(), torch.randn(2, 3)
    program, rewrites, call = foreign(model, x)
    call(x)
    with torch.no_grad():
        model.layer.bias.add_(1.0)
    for _ in range(2):
        torch.testing.assert_close(call(x), model(x).detach())
    assert rewrites == [sorted(weights_of(program))] and len(Copying.loads) == 2


def test_weights_that_stay_pytorch_s_are_inputs_like_any_other():
    model, x = Model(), torch.randn(2, 3)
    _, rewrites, call = foreign(model, x, weights=())
    call(x)
    with torch.no_grad():
        model.layer.bias.add_(1.0)
    torch.testing.assert_close(call(x), model(x).detach())
    assert not rewrites and len(Copying.loads) == 1


def test_results_in_pytorch_s_layout_are_not_copied():
    value = torch.randn(2, 3)
    assert laid_out(value, torch.empty(2, 3)) is value
    turned = laid_out(value, torch.empty(3, 2).t())
    assert turned.stride() == (1, 2) and torch.equal(turned, value)
