"""Functions made from programs: bound once, and anew only where a folded weight has changed."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from memopt.backends.aten_or_static import _emit_program
from memopt.backends.watched import WatchedProgram
from memopt.pass_manager import PassManager
from memopt.passes import INFERENCE
from memopt.program import InputKind
from tests.support import capture


class Bindings:
    """Rewrites and binds, and counts both."""

    def __init__(self, model, x):
        self.captured = capture(model, x)
        self.bound = self.rewritten = 0

    def program(self, state):
        known = dataclasses.replace(self.captured, state={**self.captured.state, **state})
        return PassManager(INFERENCE, verify=False).run(known)[0]

    def rewrite(self, state):
        self.rewritten += 1
        return self.program(state)

    def bind(self, program):
        self.bound += 1
        return _emit_program(program)


def watched(model, x):
    bindings = Bindings(model, x)
    function = WatchedProgram(bindings.program({}), bindings.rewrite, bindings.bind)
    known = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def call(x):
        given = [
            x if entry.kind is InputKind.USER else known[entry.target]
            for entry in bindings.captured.inputs
            if entry.kind is not InputKind.CONSTANT
        ]
        with torch.no_grad():
            (result,) = function(given)
        assert given == [], "the list of arguments is emptied"
        return result

    return bindings, call


def test_a_folded_weight_that_changed_is_folded_anew_once():
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)).eval()
    x = torch.randn(2, 2, 4, 4)
    bindings, call = watched(model, x)
    for _ in range(2):
        torch.testing.assert_close(call(x), model(x))
    assert (bindings.bound, bindings.rewritten) == (1, 0)
    with torch.no_grad():
        model[0].weight.mul_(2.0)
        model[1].running_mean.add_(1.0)
    for _ in range(2):
        torch.testing.assert_close(call(x), model(x))
    assert (bindings.bound, bindings.rewritten) == (2, 1)


def test_a_weight_that_no_pass_read_is_an_argument_like_any_other():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    bindings, call = watched(model, x)
    with torch.no_grad():
        model.weight.mul_(2.0)
    torch.testing.assert_close(call(x), model(x))
    assert (bindings.bound, bindings.rewritten) == (1, 0)
