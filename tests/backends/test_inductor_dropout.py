"""Dropout on the inductor backend: backward sees forward's masks, whatever is recomputed or saved as bits."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import memopt

pytestmark = pytest.mark.usefixtures("_compiler")
SEED = 7


class Small(torch.nn.Module):
    """Two layers, whose code is soon compiled."""

    def __init__(self):
        super().__init__()
        block = [torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.Linear(128, 32)]
        self.layers = torch.nn.Sequential(*block, *copy.deepcopy(block))

    def forward(self, x):
        return self.layers(x).square().mean()


def build(device):
    torch.manual_seed(0)
    if device == "small":
        return Small().double(), {"x": torch.randn(256, 32, dtype=torch.float64)}
    model = memopt.models.build("gpt2", tiny=True, layers=3, vocabulary=1024, dropout=0.3).double().to(device)
    batch = 32 if device == "cpu" else 2048  # a GPU's memory is taken in blocks of megabytes
    return model, {name: value.to(device) for name, value in model.example_inputs(batch, labels=True).items()}


def loss_of(run, inputs):
    torch.manual_seed(SEED)
    return run(**inputs)


def taken(run, model, inputs):
    """Loss and gradients of a seeded step."""
    loss = loss_of(run, inputs)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients


@functools.cache
def unconstrained(device):
    model, inputs = build(device)
    run = memopt.compile(model, backend="inductor", verify=False)
    loss, gradients = taken(run, model, inputs)
    return loss, gradients, run.report.peak_bytes


def assert_slope(run, model, inputs, gradients):
    """The loss falls along these gradients as they say, by differences of seeded losses."""
    direction = {name: torch.randn_like(gradient) for name, gradient in gradients.items()}
    slope = sum(float((gradients[name] * direction[name]).sum()) for name in gradients)
    around = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += step * direction[name]
        around.append(float(loss_of(run, inputs).detach()))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= step * direction[name]
    assert slope == pytest.approx((around[0] - around[1]) / 2e-6, rel=1e-4, abs=1e-6)


CASES = [
    ("small", 0.7),
    pytest.param("cpu", 0.6, marks=pytest.mark.long),
    *(pytest.param("cpu", share, marks=pytest.mark.slow) for share in (0.9, 0.8, 0.7, 0.5, 0.4, 0.3)),
    *(pytest.param("cuda", share, marks=pytest.mark.gpu) for share in (0.9, 0.7, 0.5)),
]


@pytest.mark.parametrize(("device", "share"), CASES)
def test_gradients_are_those_of_the_masks_that_forward_drew(device, share):
    expected_loss, expected, peak = unconstrained(device)
    torch._dynamo.reset()
    model, inputs = build(device)
    run = memopt.compile(model, int(share * peak), backend="inductor", verify=False)
    try:
        loss, gradients = taken(run, model, inputs)
    except memopt.BudgetError as error:
        assert share < 0.6 and error.minimum_bytes > share * peak
        return
    assert_slope(run, model, inputs, gradients)
    if any("operator by operator" in note for note in run.report.notes):
        return  # eager's masks, not Inductor's
    assert torch.allclose(loss, expected_loss, rtol=1e-10)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-6, atol=1e-9), name


@pytest.mark.quick("None")
@pytest.mark.parametrize("share", [1.1, None])  # a graph that is kept takes more
def test_a_schedule_of_rates_and_a_graph_that_is_kept_have_the_masks_that_forward_drew(share):
    """Inductor's masks are others than eager's, as under torch.compile: the gradients are to be of the same ones."""
    peak = unconstrained("small")[2]
    torch._dynamo.reset()
    model, inputs = build("small")
    run = memopt.compile(model, None if share is None else int(share * peak), backend="inductor", verify=False)
    for rate in (0.3, 0.6, 0.1):
        for place in (2, 6):
            run.layers[place].p = rate
        loss = loss_of(run, inputs)
        after = torch.get_rng_state()
        loss.backward(retain_graph=True)
        first = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        torch.rand(5)  # a loop that draws between two backwards
        loss.backward()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, 2 * first[name]), name
        model.zero_grad()
        again, gradients = taken(run, model, inputs)
        assert torch.equal(again, loss.detach()) and torch.equal(torch.get_rng_state(), after)
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, first[name], rtol=1e-12), name
        assert_slope(run, model, inputs, first)
