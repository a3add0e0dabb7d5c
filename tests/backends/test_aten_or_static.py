"""Operator by operator or in one arena: training always the former, inference whichever its run shows to be better."""

import pytest
import torch
from torch import nn

import memopt
from memopt.backends import aten_or_static
from memopt.backends.aten import AtenBackend
from memopt.backends.aten_or_static import AtenOrStaticBackend
from memopt.backends.static import StaticBackend
from memopt.memory.timeline import timeline
from tests.support import capture


class Record:
    """Stands for the choice: takes the first engine of a name, and remembers what it was asked."""

    picked = "static"

    def __init__(self, session, engines, settle, *, patient):
        self.engines, self.settle, self.patient = engines, settle, patient
        Record.seen.append(self)

    def bind(self, program):
        return self.engines[self.picked](program)


@pytest.fixture(autouse=True)
def _choice(monkeypatch):
    Record.seen = []
    monkeypatch.setattr(aten_or_static, "Chooser", Record)


def model_and_input():
    return nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 2)), torch.randn(3, 6)


@pytest.mark.parametrize("picked", ["static", "aten"])
def test_inference_may_run_on_either(monkeypatch, picked):
    monkeypatch.setattr(Record, "picked", picked)
    model, x = model_and_input()
    compiled = memopt.compile(model, backend=AtenOrStaticBackend(StaticBackend()))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    (choice,) = Record.seen
    assert set(choice.engines) == {"static", "aten"} and choice.patient


def test_training_never_chooses():
    model, x = model_and_input()
    compiled = memopt.compile(model, backend=AtenOrStaticBackend(StaticBackend()))
    compiled(x).sum().backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])
    assert not Record.seen
    assert [item.kind for item in compiled.report.programs] == ["training"], "and its memory is planned"


def test_a_plan_without_a_run_chooses_nothing():
    model, x = model_and_input()
    with torch.no_grad():
        report = memopt.plan(model.eval(), (x,), backend=AtenOrStaticBackend(StaticBackend()))
    assert report.peak_bytes > 0
    assert all(not choice.engines for choice in Record.seen)


def test_inference_is_planned_as_the_arena_lays_it_out_and_held_to_its_runs():
    model, x = model_and_input()
    program = capture(model.eval(), x)
    static = StaticBackend()
    engine = AtenOrStaticBackend(static)
    assert engine.timeline(program) == static.timeline(program) != timeline(program)
    assert engine.measures and engine.exact and isinstance(engine, AtenBackend)
