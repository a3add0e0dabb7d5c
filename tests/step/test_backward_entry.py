from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import memopt
from memopt.backends.inductor import missing_compiler
from memopt.step.backward_entry import BackwardFacts

COMPILER = missing_compiler(torch.device("cpu")) is None
INDUCTOR = pytest.param("inductor", marks=pytest.mark.skipif(not COMPILER, reason="no C++ compiler"))


def deep():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh()) for _ in range(6)])


@pytest.fixture(scope="module")
def tight():
    """A model, its stand-in that recomputes much, and a batch."""
    model, x = deep(), torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(memopt.BudgetError) as refused:
        memopt.compile(model, 600_000, backend="aten", verify=False)(x)
    least = refused.value.minimum_bytes  # products run again within so much
    compiled = memopt.compile(model, int(1.01 * least), backend="aten", verify=False)
    compiled(x).square().mean().backward()
    return model, compiled, x


def _gradients(model, called, x, write):
    state = copy.deepcopy(model.state_dict())
    batch = x.clone()
    model.zero_grad()
    try:
        loss = called(batch).square().mean()
        write(model, batch)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]
    finally:
        model.load_state_dict(state)


def _data(name, change):
    return lambda model, batch: change(model.get_parameter(name).data)


def _moved(name, value):
    def write(model, batch):
        model.get_parameter(name).data = value

    return write


def _in_place(name):
    def write(model, batch):
        with torch.no_grad():
            model.get_parameter(name).add_(1)

    return write


HARMLESS = {
    "a bias by its data": _data("2.0.bias", lambda data: data.add_(1)),
    "a bias in place": _in_place("2.0.bias"),
    "a bias that lies elsewhere": _moved("2.0.bias", torch.ones(64)),
    "a scale by its data": _data("2.1.weight", lambda data: data.mul_(2)),
    "nothing": lambda model, batch: None,
}
REFUSED = {
    "a weight by its data": (_data("2.0.weight", lambda data: data.mul_(1.5)), "parameter '2.0.weight'"),
    "a weight that is clipped": (_data("2.0.weight", lambda data: data.clamp_(-0.05, 0.05)), "parameter '2.0.weight'"),
    "a weight in place": (_in_place("2.0.weight"), "parameter '2.0.weight'"),
    "a weight that lies elsewhere": (_moved("2.0.weight", torch.ones(64, 64)), "parameter '2.0.weight'"),
    "the batch by its data": (lambda model, batch: batch.data.zero_(), "input args\\[0\\]"),
    "the batch in place": (lambda model, batch: batch.zero_(), "input args\\[0\\]"),
}


@pytest.mark.parametrize("what", HARMLESS)
def test_what_eager_does_not_read_may_be_written_between_forward_and_backward(tight, what) -> None:
    model, compiled, x = tight
    expected = _gradients(model, model, x, HARMLESS[what])
    for first, second in zip(_gradients(model, compiled, x, HARMLESS[what]), expected, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("what", REFUSED)
def test_what_backward_recomputes_activations_from_may_not(tight, what) -> None:
    model, compiled, x = tight
    write, name = REFUSED[what]
    with pytest.raises(RuntimeError, match=f"{name} was changed between forward and backward, which recomputes"):
        _gradients(model, compiled, x, write)
    _gradients(model, compiled, x, HARMLESS["nothing"])


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
def test_a_bias_may_be_written_where_torchs_own_partition_recomputes_from_it() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()), torch.randn(512, 64)
    compiled = memopt.compile(model, backend="inductor", verify=False)

    def write(model, batch):
        model[0].bias.data.add_(1)
        with torch.no_grad():
            model[2].bias.add_(1)

    expected = _gradients(model, model, x, write)
    for first, second in zip(_gradients(model, compiled, x, write), expected, strict=True):
        torch.testing.assert_close(first, second)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x, y):
        h = torch.relu(self.body(x))
        return self.first(h), {"second": self.second(h) + y, "flat": self.second.weight.view(-1)}


LOSSES = {
    "first": lambda a, b: a.square().mean(),
    "second": lambda a, b: b["second"].square().mean(),
    "view": lambda a, b: b["flat"].sum(),
    "both": lambda a, b: a.sum() + b["second"].sum(),
}


@pytest.mark.parametrize("backend", ["aten", INDUCTOR])
@pytest.mark.parametrize("budget", [None, "1MB"])
def test_a_head_that_the_loss_does_not_use_has_no_gradient(backend, budget) -> None:
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(5, 8)
    compiled = memopt.compile(model, budget, backend=backend, verify=False)
    for name in (*LOSSES, "first"):
        for accumulate in (False, True):
            y = torch.randn(4, requires_grad=True)
            found = []
            for called in (model, compiled):
                model.zero_grad()
                y.grad = None
                for loss in ("first", name) if accumulate else (name,):
                    LOSSES[loss](*called(x, y)).backward()
                found.append([None if item.grad is None else item.grad.clone() for item in (*model.parameters(), y)])
            for first, second in zip(*found, strict=True):
                assert (first is None) == (second is None), (name, accumulate)
                if first is not None:
                    torch.testing.assert_close(first, second)


def test_gradients_that_are_asked_for_and_not_there_are_unused() -> None:
    model, x = Heads(), torch.randn(5, 8)
    compiled = memopt.compile(model, backend="aten", verify=False)
    first, _ = compiled(x, torch.zeros(4))
    assert torch.autograd.grad(first.sum(), model.second.weight, allow_unused=True) == (None,)


@pytest.mark.parametrize("backend", ["aten", INDUCTOR])
def test_a_graph_may_be_kept_for_another_backward_after_one_that_was_not(backend) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(3)])
    compiled, x = memopt.compile(model, backend=backend, verify=False), torch.randn(16, 32)
    compiled(x).sum().backward()
    found = []
    for called in (model, compiled):
        model.zero_grad()
        y = called(x)
        y[:, :3].sum().backward(retain_graph=True)
        y.pow(3).mean().backward(retain_graph=True)
        y[3].sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("backend", ["aten", INDUCTOR])
def test_a_second_derivative_is_refused(backend) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8, requires_grad=True)
    compiled = memopt.compile(model, backend=backend, verify=False)
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(model(x).sum(), x)[0])
    with pytest.raises(RuntimeError, match="first derivatives only: call the original model"):
        gradient.norm(2).backward()


def test_facts_are_read_as_they_were_written() -> None:
    facts = BackwardFacts(2, ((0, 1), None), ((3, "parameter 'a'"),))
    assert BackwardFacts.of_list(facts.listed()) == facts
