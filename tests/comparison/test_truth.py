"""The float64 truth of a step, and how far others are from it."""

import math

import pytest
import torch
from torch import nn

from memopt.comparison.record import Row, judged
from memopt.comparison.steps import Engine, call, loss_of, placed
from memopt.comparison.truth import SAMPLE, Values, errors, sample, step_values, truth


class Noisy(nn.Module):
    def __init__(self, always=False):
        super().__init__()
        self.linear, self.dropout, self.always = nn.Linear(64, 64), nn.Dropout(0.5), always

    def forward(self, x):
        x = self.linear(x)
        return nn.functional.dropout(x, 0.5, True) if self.always else self.dropout(x)


def test_float32_is_as_far_as_float32_is():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)), torch.randn(16, 32)
    found = step_values(model, model, (x,), True)
    reference, is_random = truth(model, (x,), True)
    error, gradient_error = errors(found, reference)
    assert not is_random
    assert 0 < error < 1e-6 and 0 < gradient_error < 1e-6
    assert all(p.grad is None and p.dtype is torch.float64 for p in model.parameters())


def test_a_wrong_gradient_is_seen():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    reference, _ = truth(model, (x,), True)
    found = step_values(model, model, (x.double(),), True)
    assert errors(found, reference) == (0.0, 0.0)
    found.gradients["bias"][0] += 1
    assert errors(found, reference)[1] > 1e-2


def test_random_steps_are_compared_in_eval_mode():
    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(4, 64)
    reference, is_random = truth(model, (x,), True)
    assert is_random
    model.float().eval()
    error, gradient_error = errors(step_values(model, model, (x,), True), reference)
    assert error < 1e-6 and gradient_error < 1e-6


@pytest.mark.parametrize("training", [True, False])
def test_what_is_always_random_cannot_be_compared(training):
    with pytest.raises(ValueError, match="draws random numbers"):
        truth(Noisy(always=True), (torch.randn(4, 64),), training)


def test_other_results_than_the_models_are_refused():
    one = Values([torch.ones(2)], {"w": torch.ones(2)})
    with pytest.raises(ValueError, match="other results"):
        errors(Values([torch.ones(2)], {}), one)
    with pytest.raises(ValueError, match="another size"):
        errors(Values([torch.ones(3)], {"w": torch.ones(2)}), one)


def test_nothing_and_infinity():
    assert errors(Values([], {}), Values([], {})) == (None, None)
    assert errors(Values([torch.zeros(2)], {}), Values([torch.zeros(2)], {})) == (0.0, None)
    assert errors(Values([torch.ones(2)], {}), Values([torch.zeros(2)], {})) == (math.inf, None)


def test_large_tensors_are_sampled_at_the_same_places():
    values = torch.arange(3 * SAMPLE).reshape(3, SAMPLE).float()
    found = sample(values)
    assert found.numel() == SAMPLE and found.dtype is torch.float64
    assert torch.equal(found, sample(values.double()))
    assert torch.equal(sample(torch.tensor([1 + 2j])), torch.tensor([1.0, 2.0], dtype=torch.float64))


def test_rows_are_judged_by_eager():
    rows = (
        Row("eager", error=1e-4, gradient_error=1e-4),
        Row("aten", error=1e-3, gradient_error=1e-3),
        Row("inductor", error=1e-4, gradient_error=1e-2),
        Row("static", error=math.nan),
        Row("xla", reason="missing"),
    )
    assert [row.differs for row in judged(rows, torch.float32)] == [False, False, True, True, False]
    assert not judged((Row("aten", error=1e-6),), torch.float32)[0].differs
    assert judged((Row("aten", error=1e-4),), torch.float32)[0].differs


def test_losses():
    a = torch.ones(3, requires_grad=True)
    assert loss_of((a * 2).sum()) == 6
    assert loss_of({"x": a * 2, "y": a * 4, "ids": torch.arange(3)}) == 6

    class Out:
        loss = torch.tensor(5.0)

    assert loss_of(Out()) == 5
    with pytest.raises(ValueError, match="no result of the model has a gradient"):
        loss_of(torch.ones(2))


def test_inputs_are_moved_and_cast():
    model, inputs = placed(
        nn.Linear(2, 2),
        {"x": torch.ones(1, 2), "n": 3, "ids": torch.ones(1).long()},
        torch.device("cpu"),
        torch.bfloat16,
    )
    assert inputs["x"].dtype is torch.bfloat16 and inputs["ids"].dtype is torch.int64 and inputs["n"] == 3
    assert call(model, {"input": inputs["x"]}).dtype is torch.bfloat16
    assert torch.equal(call(model, [inputs["x"]]), model(inputs["x"]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensorrt", "unknown engine 'tensorrt'"),
        ("compile:2", "between 0 and 1"),
        ("aten:20", "20 what"),
        ("eager:1", "eager takes no setting"),
    ],
)
def test_engines_that_are_none(name, message):
    with pytest.raises(ValueError, match=message):
        Engine.parse(name)


def test_engines():
    assert Engine.parse("inductor:8GB") == Engine("inductor", "8GB")
    assert Engine.parse("compile:0.5").name == "compile:0.5" and Engine.parse("compile").is_peer
    assert not Engine.parse("onnxruntime").in_torch_memory
    for name in ("compile:0.5", "checkpoint"):
        with pytest.raises(ValueError, match="nothing to save in inference"):
            Engine.parse(name).ready(nn.Linear(2, 2), False, None)
