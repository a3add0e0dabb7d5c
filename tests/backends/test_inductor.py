"""The inductor backend: close to eager in training and inference, and a clear word where it cannot be used."""

import logging

import pytest
import torch

import memopt
from tests.end_to_end import gradients, restorer, step


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("name", [pytest.param("resnet18", marks=pytest.mark.slow), "gpt2"])
def test_a_step_is_close_to_eager_s(name):
    torch.manual_seed(0)
    model = memopt.models.build(name, tiny=True, dropout=0.0)
    inputs = model.example_inputs(4, labels=True)
    report = memopt.plan(model, inputs)
    torch._dynamo.reset()
    restore = restorer(model)
    loss, expected = step(model, inputs), gradients(model)
    buffers = [b.clone() for b in model.buffers()]
    restore()
    budget = (report.minimum_bytes + report.unconstrained_bytes) // 2
    compiled = memopt.compile(model, budget, backend="inductor")
    close(step(compiled, inputs), loss)
    close(gradients(model), expected)
    close(list(model.buffers()), buffers)
    assert compiled.report.backend == "inductor"
    assert compiled.report.peak_bytes <= budget


@pytest.mark.usefixtures("_compiler")
def test_inference_is_close_to_eager_s_and_follows_its_weights():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)
    compiled = memopt.compile(model, backend="inductor")
    with torch.no_grad():
        close(compiled(x), model(x))
        model[0].weight.mul_(2.0)
        close(compiled(x), model(x))


def test_without_a_compiler_aten_runs_and_the_report_says_so(monkeypatch, caplog):
    monkeypatch.setattr("memopt.backends.inductor.missing_compiler", lambda device: "Inductor needs a C++ compiler")
    with caplog.at_level(logging.WARNING, logger="memopt"):
        compiled = memopt.compile(torch.nn.Linear(3, 2))
    assert [record.getMessage() for record in caplog.records] == [
        'Inductor needs a C++ compiler: backend "aten" is used instead'
    ]
    compiled(torch.ones(1, 3))
    assert compiled.report.backend == "aten"
    assert compiled.report.notes == ('Inductor needs a C++ compiler: backend "aten" is used instead',)
