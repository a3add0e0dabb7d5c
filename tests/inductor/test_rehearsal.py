"""Code made of graphs that are only collected: what it takes is known, and none of it runs."""

import copy

import pytest
import torch
from torch import nn
from torch._inductor.exc import InductorError

import memopt
from memopt.compilation.session import Session
from memopt.inductor.forward_backward import ForwardBackward, GraphCode
from tests.support import assert_same

pytestmark = pytest.mark.usefixtures("_compiler")


class Two(nn.Module):
    """Two graphs, by a graph break."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        x = nn.functional.gelu(self.first(x))
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


def test_what_is_rehearsed_is_what_is_made(monkeypatch):
    found, made = [], []
    emitted, init = Session.emitted, GraphCode.__init__

    def seen(self, program, peaks):
        found.append((self.dry, peaks))
        return emitted(self, program, peaks)

    def making(self, module):
        made.append(self)
        init(self, module)

    monkeypatch.setattr(Session, "emitted", seen)
    monkeypatch.setattr(GraphCode, "__init__", making)
    compiled = memopt.compile(Two(), "1MB", backend="inductor")
    compiled(torch.randn(32, 16)).backward()
    rehearsed, real = ([peaks for dry, peaks in found if dry is which] for which in (True, False))
    assert len(real) == 2 and rehearsed == real
    assert all(code.wrapper is not None for code in made) and len(made) == 8
    assert not compiled.report.notes


def test_a_graph_without_code_is_collected_as_its_operators(monkeypatch):
    def refuse(self, module, inputs, **options):
        raise InductorError(NotImplementedError("no such kernel"), None)

    monkeypatch.setattr(ForwardBackward, "compile", refuse)
    model, x = Two(), torch.randn(32, 16)
    expected = model(x)
    compiled = memopt.compile(model, "1MB", backend="inductor")
    torch.testing.assert_close(compiled(x), expected)
    assert any("no code for this graph" in note for note in compiled.report.notes)
    assert any("operator by operator" in note for note in compiled.report.notes)


class ViewsThenBreak(nn.Module):
    """Its first graph returns views of what needs gradients, and what needs none: AOTAutograd infers with it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        rows = x.unflatten(0, (-1, 2))
        if rows.detach().sum() > 1e9:
            rows = rows * 2
        return self.layer(rows.transpose(0, 1)).tanh()


@pytest.mark.long
@pytest.mark.parametrize(("budget", "verify"), [(None, "full"), ("1MB", True)])
def test_a_graph_of_views_before_a_break_is_no_step_of_its_own(budget, verify, caplog):
    model = ViewsThenBreak()
    compiled = memopt.compile(copy.deepcopy(model), budget=budget, verify=verify, backend="inductor")
    results = []
    for run in (model, compiled, compiled):
        x = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
        out = run(x)
        out.sum().backward()
        results.append((out.detach(), x.grad))
    assert_same(results[1:], [results[0]] * 2, rtol=1e-5, atol=1e-6)
    assert not [record for record in caplog.records if "failed" in record.getMessage()]


class Taught(nn.Module):
    """The first of two graphs computes nothing that has a gradient, though its weights have one."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        with torch.no_grad():
            y = self.teacher(x).relu()
        torch._dynamo.graph_break()
        return self.student(y), y


@pytest.mark.quick("None")
@pytest.mark.parametrize("budget", [None, "1MB", "30kB"])
def test_a_graph_of_a_step_that_has_nothing_to_differentiate_is_code_all_the_same(budget):
    torch._dynamo.reset()
    model = Taught()
    compiled = memopt.compile(model, budget, backend="inductor")
    x = torch.randn(8, 16)
    for _ in range(2):
        found = []
        for run in (model, compiled):
            model.zero_grad()
            outputs = run(x)
            outputs[0].square().mean().backward()
            found.append((*outputs, *(parameter.grad for parameter in model.parameters())))
        torch.testing.assert_close(found[1], found[0])
    assert not [note for note in compiled.report.notes if "memopt failed" in note]
