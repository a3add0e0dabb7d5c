"""Models that look at values between their graphs: planned as they will run, whatever they look at."""

import functools

import pytest
import torch
import torch.nn.utils.parametrizations as parametrizations
from torch import nn

import memopt


def _net(width=16):
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


class Looking(nn.Module):
    def __init__(self, look, inner=None):
        super().__init__()
        self.first = _net() if inner is None else inner
        self.second = _net()
        self.look = look

    def forward(self, x, ids):
        return self.look(self, x, ids)


def _check_ids(model, x, ids):
    if ids.max() >= 100:
        raise ValueError("bad label")
    return model.second(model.first(x))


def _check_inputs(model, x, ids):
    if x.max() > 1e9:
        raise ValueError("bad input")
    return model.second(model.first(x))


def _check_middle(model, x, ids):
    y = model.first(x)
    if not torch.isfinite(torch.dropout(y, 0.5, model.training)).all():
        raise ValueError("not finite")
    return model.second(y)


def _unlikely(model, x, ids):
    y = model.first(x)
    if y.sum() > 1e9:
        y = y * 2
    return model.second(y)


def _likely(model, x, ids):
    y = model.first(x)
    if y.sum() < 1e9:
        y = y * 2
    return model.second(y)


def _split(model, x, ids):
    parts = model.first(x).split(ids.bincount().tolist())
    return torch.cat([model.second(part) * (index + 1) for index, part in enumerate(parts)])


def _until(model, x, ids):
    y = x
    while y.abs().max() > 0.5:
        y = model.first(y) * 0.5
    return model.second(y)


def _route(model, x, ids):
    y, chosen = model.first(x), torch.nonzero(ids > 1).flatten()
    return y.index_add(0, chosen, model.second(y[chosen]))


def _written(model, x, ids):
    seen = torch.zeros_like(ids)
    seen.add_(ids)
    if seen.max() >= 100:
        raise ValueError("bad label")
    return model.second(model.first(x))


LOOKS = [_check_ids, _check_inputs, _check_middle, _unlikely, _likely, _split, _until, _route, _written]


def _same(make, budget, train=True, steps=2):
    """Eager's numbers, and every graph planned for together."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().train(train)
    other = make().train(train)
    other.load_state_dict(model.state_dict())
    compiled = memopt.compile(other, budget, backend="aten")
    x, ids = torch.randn(8, 16), torch.tensor([0, 1, 1, 2, 2, 2, 0, 0])
    with torch.set_grad_enabled(train):
        for step in range(steps):
            results = []
            for run, module in ((model, model), (compiled, other)):
                module.zero_grad()
                torch.manual_seed(step)
                outputs = run(x, ids)
                if train:
                    outputs.pow(2).mean().backward()
                gradients = [parameter.grad for parameter in module.parameters()]
                results.append([outputs, gradients, list(module.buffers()), torch.rand(1)])
            torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
    assert not [note for note in compiled.report.notes if "planned by itself" in note]
    return other


@pytest.mark.quick("_check_ids", "_written", "_check_inputs")
@pytest.mark.parametrize("look", LOOKS)
def test_what_is_looked_at_is_known_in_the_rehearsal(look):
    # Eager's own peak is some bytes less than what a value between two graphs takes beside them.
    _same(lambda: Looking(look), "11kB" if look in (_check_middle, _unlikely) else 1.0)


@pytest.mark.quick("1GB-True-_check_ids", "None-False-_likely")
@pytest.mark.parametrize("look", [_check_ids, _likely])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("budget", [None, "1GB"])
def test_with_every_budget_in_both_modes(budget, train, look):
    _same(lambda: Looking(look), budget, train)


class NotPickled(nn.Sequential):
    def __getstate__(self):
        raise RuntimeError("not to be pickled")


class Slotted(nn.Linear):
    __slots__ = ("scale",)

    def __init__(self):
        super().__init__(16, 16)
        self.scale = 2.0

    def forward(self, x):
        return super().forward(x) * self.scale


class Lazily(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(16, 16), None

    @property
    def inner(self):
        return self.linear

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(16.0)
        return self.inner(x) + self.table


def _rebound():
    net = _net()
    before = net.forward
    net.before = before
    net.forward = functools.update_wrapper(
        functools.partial(lambda module, x: torch.relu(module.before(x)), net), before
    )
    return net


INNER = {
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 16)), nn.ReLU()),
    "spectral_norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(16, 16)), nn.ReLU()),
    "not pickled": lambda: NotPickled(nn.Linear(16, 16)),
    "slots": Slotted,
    "lazily made, with a property": Lazily,
    "methods bound to it": _rebound,
}


@pytest.mark.quick("slots", "weight_norm")
@pytest.mark.parametrize("name", INNER)
def test_modules_of_all_kinds_stand_beside_a_check(name):
    _same(lambda: Looking(_check_ids, INNER[name]()), 1.0)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.calls = nn.Linear(16, 16), nn.BatchNorm1d(16), 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x, ids):
        self.seen += 1
        self.calls += 1
        x = torch.dropout(x, 0.5, True)
        torch._dynamo.graph_break()
        y = self.norm(self.first(x))
        if ids.max() > 100 or self.calls == 2:
            y = self.first(y)
        return y


@pytest.mark.long
@pytest.mark.parametrize("budget", [None, "1GB"])
def test_a_call_that_begins_anew_changes_nothing_twice(budget):
    assert _same(Counting, budget, steps=3).calls == 3


class Nothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = _net()

    def forward(self, x, sizes):
        x = x.float()
        count = int(sizes.tolist()[0])
        return self.net(x) * count


@pytest.mark.quick("1.0-True", "None-False")
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("budget", [None, 1.0, "1GB"])
def test_a_graph_may_compute_nothing(budget, train):
    _same(Nothing, budget, train)


def test_an_impossible_budget_beside_it_is_refused():
    with pytest.raises(memopt.BudgetError):
        _same(Nothing, "1kB", train=False)
