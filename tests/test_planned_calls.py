"""Calls begin anew where weights are to be laid out first."""

import torch
from torch import nn

import memopt
from memopt.layout import LayoutNeeded


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
    monkeypatch.setattr("memopt.planned_calls.lay_out", lambda *args: moved.append(args))
    with torch.no_grad():
        assert torch.equal(run(x), model(x))
    assert moved == [(model, ("weight",), ())]
    assert run._memopt.last.contiguous == (True,) and run._memopt.last.movable == frozenset()
