"""Dropout within a budget: eager's masks, the same ones in recomputation, and gradients that differences confirm."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Attention(nn.Module):
    """Attention with dropout on its weights and on its result, spelled out or by PyTorch's own operator."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.mix = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.mix(x).chunk(3, -1))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        else:
            y = self.dropout((q @ k.transpose(-1, -2) / 2).softmax(-1)) @ v
        return self.dropout(self.out(y.transpose(1, 2).flatten(2))).tanh() + x


def mlp():
    layers = []
    for _ in range(3):
        layers += [nn.Linear(8, 8), nn.Dropout(0.4), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 1))


MODELS = {
    "mlp": (mlp, (64, 8)),
    "attention": (lambda: Attention(False), (4, 16, 8)),
    "fused_attention": (lambda: Attention(True), (4, 16, 8)),
}


def make(name):
    torch.manual_seed(0)
    factory, shape = MODELS[name]
    return factory().double(), torch.randn(shape, dtype=torch.float64)


def loss_of(run, x, seed=3):
    torch.manual_seed(seed)
    return run(x).square().sum()


def budgets(model, x):
    """None, the least, and two in between."""
    report = memopt.plan(model, (x,))
    low, high = int(report.minimum_bytes * 1.02), report.unconstrained_bytes
    return [None, low, (2 * low + high) // 3, (low + 2 * high) // 3]


@pytest.mark.quick("mlp")
@pytest.mark.parametrize("name", MODELS)
def test_gradients_pass_a_finite_difference_check_at_every_budget(name):
    model, x = make(name)
    for budget in budgets(model, x):
        torch._dynamo.reset()
        model.zero_grad()
        compiled = memopt.compile(model, budget, backend="aten")
        loss_of(compiled, x).backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        torch.manual_seed(7)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            direction = torch.randn_like(parameter)
            start, values = parameter.detach().clone(), []
            for sign in (1, -1):
                parameter.data.copy_(start + sign * 1e-6 * direction)
                values.append(loss_of(compiled, x).detach())
            parameter.data.copy_(start)
            slope = (values[0] - values[1]) / 2e-6
            torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-6)


@pytest.mark.quick("mlp")
@pytest.mark.parametrize("name", MODELS)
def test_masks_are_eager_s_and_repeat_under_a_seed(name):
    model, x = make(name)
    loss = loss_of(model, x)
    loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    after_eager = torch.get_rng_state()
    for budget in budgets(model, x):
        torch._dynamo.reset()
        compiled = memopt.compile(model, budget, backend="aten")
        for _ in range(2):
            model.zero_grad()
            found = loss_of(compiled, x)
            found.backward()
            torch.testing.assert_close(found, loss, rtol=0, atol=0)
            torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=0, atol=0)
            assert torch.equal(torch.get_rng_state(), after_eager)
        model.zero_grad()
        assert loss_of(compiled, x, seed=4) != loss


def test_without_a_seed_every_call_draws_anew():
    model, x = make("mlp")
    compiled = memopt.compile(model, budgets(model, x)[2], backend="aten")
    torch.manual_seed(5)
    found = [compiled(x).detach() for _ in range(2)]  # a graph that is kept would count in the next call
    torch.manual_seed(5)
    expected = [model(x).detach() for _ in range(2)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.equal(found[0], found[1])
