"""Functions made from programs: bound once, and anew only where a folded weight has changed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import memopt
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


class Holding:
    """An engine's function that takes memory at a call and keeps it."""

    def __init__(self, missing):
        self.needs = self.missing_bytes = missing

    def __call__(self, args):
        self.missing_bytes = 0
        args.clear()
        return ()

    def release(self):
        self.missing_bytes = self.needs


@pytest.mark.parametrize(("missing", "available", "kept"), [(9, 10, True), (11, 10, False), (None, 10, False)])
def test_memory_that_others_hold_is_given_back_where_there_is_no_room_beside_it(monkeypatch, missing, available, kept):
    """Evaluations of two sizes: each is a CUDA graph in memory of its own."""
    bindings = Bindings(nn.Linear(2, 2), torch.randn(1, 2))
    others, made = [], [Holding(missing), Holding(missing)]
    functions = [WatchedProgram(bindings.program({}), bindings.rewrite, lambda _, run=run: run) for run in made]
    for function in functions:
        function.lies_beside(others)
        others.append(function)
    monkeypatch.setattr("memopt.memory.allocator_limit.limit_available_bytes", lambda: None)
    functions[0]([])
    assert made[0].missing_bytes == 0, "without a limit nothing is asked"
    monkeypatch.setattr("memopt.memory.allocator_limit.limit_available_bytes", lambda: available)
    functions[1]([])
    assert made[1].missing_bytes == 0 and (made[0].missing_bytes == 0) is kept
    functions[1]([])
    assert (made[0].missing_bytes == 0) is kept, "what has its memory takes nobody's"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_evaluations_of_several_sizes_share_a_budget_on_a_gpu():
    """The CUDA graph of the first size was counted as another process's, and the budget raised by it."""
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    model = nn.Sequential(nn.Linear(256, 8192), nn.Tanh(), nn.Linear(8192, 256)).cuda().eval()
    others = torch.cuda.memory_allocated() - sum(parameter.nbytes for parameter in model.parameters())
    run = memopt.compile(model, "650MB", backend="inductor")
    sizes = [torch.randn(rows, 256, device="cuda") for rows in (8192, 7000, 6000)]
    with torch.no_grad():
        expected = [model(x).cpu() for x in sizes]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        for _ in range(3):
            for x, right in zip(sizes, expected, strict=True):
                torch.testing.assert_close(run(x).cpu(), right, rtol=1e-3, atol=1e-3)
    assert not any("come on top" in note for note in run.report.notes), run.report.notes
    assert torch.cuda.max_memory_reserved() - others <= run.report.budget_bytes
