"""Calls begin anew where weights are to be laid out first."""

import copy

import pytest
import torch
from torch import nn

import memopt
from memopt.backends.aten import AtenBackend
from memopt.capture.export import CaptureError
from memopt.compilation.layout import LayoutNeeded


def test_weights_are_laid_out_and_the_call_begins_anew(monkeypatch):
    torch._dynamo.reset()
    model, x, moved = nn.Linear(4, 4), torch.randn(2, 4), []
    run = memopt.compile(model, backend="aten")
    planned, needed = run._memopt.planned, [LayoutNeeded(["weight"], [], [True])]
    call = planned._call

    def first_needs_layout(*args):
        if needed:
            raise needed.pop()
        return call(*args)

    monkeypatch.setattr(planned, "_call", first_needs_layout)
    monkeypatch.setattr("memopt.calls.planned.lay_out", lambda *args: moved.append(args))
    with torch.no_grad():
        assert torch.equal(run(x), model(x))
    assert moved == [(model, ("weight",), ())]
    assert run._memopt.last.layout.contiguous == (True,) and run._memopt.last.layout.movable == frozenset()


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


@pytest.mark.parametrize("budget", [None, "1MB"])
def test_no_graph_of_several_is_lowered_before_all_are_known(monkeypatch, budget):
    torch._dynamo.reset()
    lowered, compile_captured = [], AtenBackend.compile_captured

    def counted(self, graph_module, *rest):
        lowered.append(graph_module)
        return compile_captured(self, graph_module, *rest)

    monkeypatch.setattr(AtenBackend, "compile_captured", counted)
    model, x = Broken(), torch.randn(4, 8)
    memopt.compile(model, budget, backend="aten")(x).backward()
    assert len(lowered) == 4, "each as it is collected, and as it runs"
    assert model.first.weight.grad is not None


class Averages(nn.BatchNorm1d):
    """By a number that it looks at, which ends a graph."""

    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


class LooksAtItsCount(nn.Module):
    """Writes to its input, to a buffer and to an attribute, and then looks at a number."""

    def __init__(self):
        super().__init__()
        self.norm = Averages(6, momentum=None)
        self.plain, self.square = torch.ones(6), False
        self.register_buffer("seen", torch.ones(6))

    def forward(self, x):
        y = x.T
        y.mul_(2)
        self.plain = self.plain * 2
        self.seen.mul_(3)
        y = self.norm(y + self.seen)
        return torch.tanh(y) if self.square else y.sin()


@pytest.mark.long
def test_what_a_call_wrote_to_before_it_began_anew_is_written_to_once():
    torch._dynamo.reset()
    model = LooksAtItsCount()
    eager = copy.deepcopy(model)
    run = memopt.compile(model, backend="aten")
    for square in (False, True):  # by the second call the model is known, and another graph of it comes
        model.square = eager.square = square
        x = torch.linspace(-1, 1, 24).reshape(6, 4) ** 3
        given = x.clone()
        torch.testing.assert_close(run(given), eager(x))
        torch.testing.assert_close(given, x)
        torch.testing.assert_close([*model.buffers(), model.plain], [*eager.buffers(), eager.plain])


def test_a_call_that_wrote_to_a_large_tensor_does_not_begin_anew():
    torch._dynamo.reset()
    run = memopt.compile(LooksAtItsCount(), backend="aten")
    with pytest.raises(CaptureError, match=r"^input 0 of LooksAtItsCount was written to before all graphs") as caught:
        run(torch.zeros(6, 2**16))
    assert "\n" not in str(caught.value)
