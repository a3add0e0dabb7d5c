"""Floats that a schedule sets become inputs of the graph; what cannot is compiled anew, and the user is told once."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.torch_version import TorchVersion

import memopt
from memopt.calls.guard_fast_path import Kind
from memopt.torch_compat.changing_numbers import ChangingNumbers

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Scheduled(nn.Module):
    """Uses one number in one way, within a part of the model."""

    def __init__(self, use):
        super().__init__()
        self.layer, self.use, self.value = nn.Linear(8, 8), use, 1.0

    def forward(self, x):
        return self.use(self.layer(x), self.value)


USES = {
    "product": lambda y, value: y * value,
    "mixture": lambda y, value: (1 - value) * y.tanh() + value * y.sin(),
    "quotient": lambda y, value: torch.softmax(y / (value + 2), -1),
    "sum of two": lambda y, value: y + (y - value) * (value**2 / 3),
    "comparison": lambda y, value: y * value if value > 1.45 else y.sin() / value,
    "bfloat16": lambda y, value: (y.to(torch.bfloat16) * value).float(),
}


def passed_on(run, model, twin, values, x, training=True):
    for value in values:
        run.value = twin.value = value
        with torch.set_grad_enabled(training):
            found, expected = run(x), twin(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        if training:
            for each, out in ((model, found), (twin, expected)):
                each.zero_grad()
                out.square().sum().backward()
            torch.testing.assert_close(model.layer.weight.grad, twin.layer.weight.grad, rtol=0, atol=0)


@pytest.mark.quick("product-True", "bfloat16-False", "comparison-False")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("use", USES)
def test_a_schedule_is_compiled_for_twice_at_most(use, training, monkeypatch):
    torch.manual_seed(0)
    model = Scheduled(USES[use])
    twin = copy.deepcopy(model)
    run = memopt.compile(model, "1MB" if training else None, backend="aten")
    x = torch.randn(4, 8)
    passed_on(run, model, twin, (1.0, 1.5, 1.3), x, training)
    session = run._memopt.sessions[Kind(True, False).plan]
    before = len(session.known_plans), run.report
    passed_on(run, model, twin, [1.0 + i / 10 for i in range(20)], x, training)
    assert (len(session.known_plans), run.report) == before and run._memopt.sessions[Kind(True, False).plan] is session


class Reversed(torch.autograd.Function):
    """A gradient reversal, as adversarial training writes it."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.by * grad, None


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated")
def test_a_number_that_dynamo_loses_as_an_input_is_compiled_for_a_few_values(caplog):
    """torch.compile, for which floats are constants, traces it; with inputs Dynamo fails between the two functions."""

    def use(y, value):
        return Reversed.apply(y.sin(), value) + Reversed.apply(y.cos(), value / 2)

    torch.manual_seed(0)
    model = Scheduled(use)
    twin = copy.deepcopy(model)
    run = memopt.compile(model, "1MB", backend="aten", verify=False)
    x = torch.randn(4, 8)
    with caplog.at_level(logging.WARNING, "memopt"):
        passed_on(run, model, twin, (1.0, 0.5, 0.25, 0.5), x)
    assert not caplog.records and run.report.programs
    # A schedule that goes on is not compiled for at each step: the step runs eagerly, within the budget.
    with caplog.at_level(logging.WARNING, "memopt"):
        passed_on(run, model, twin, [i / 16 for i in range(1, 9)], x)
    lines = [each.getMessage() for each in caplog.records]
    if TorchVersion(torch.__version__) < (2, 13):  # it is traced there, and compiled for each value, which is said
        assert len(lines) == 1 and "each is compiled anew: keep it in a tensor" in lines[0]
        return
    (line,) = [line for line in lines if "runs eagerly" in line]
    assert "torch's tracer fails" in line and "keep self.value in a tensor" in line


@pytest.mark.long
@pytest.mark.parametrize("use", ["exponent", "slope", "full", "integer"])
def test_what_is_compiled_anew_for_each_value_is_said_once(use, caplog):
    torch.manual_seed(0)
    uses = {
        "exponent": lambda y, value: y.abs() ** value,
        "slope": F.leaky_relu,
        "full": lambda y, value: y * torch.full((8,), value),
        "integer": lambda y, value: y * value,
    }
    model = Scheduled(uses[use])
    twin = copy.deepcopy(model)
    run = memopt.compile(model, backend="aten", verify=False)
    values = range(10) if use == "integer" else [1.0 + i / 10 for i in range(10)]
    with caplog.at_level(logging.WARNING, "memopt"):
        passed_on(run, model, twin, values, torch.randn(4, 8), training=False)
    (line,) = [record.getMessage() for record in caplog.records if "another number" in record.getMessage()]
    assert "self.value of Scheduled" in line and "tensor" in line and "\n" not in line


def test_the_number_that_changed_most_is_named():
    numbers = ChangingNumbers("Net")
    assert [numbers.changes(0, "L['x']", value) for value in (1.0, 1.0, 2.0)] == [False, False, True]
    assert numbers.often == ""
    for value in range(9):
        numbers.changes(0, "L['self']._modules['encoder'].scale", value)
    assert numbers.often == "self.encoder.scale"
