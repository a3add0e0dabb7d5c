"""Loops of models that cannot be captured: what they return, hold and ask is counted, or refused in a line."""

from __future__ import annotations

import dataclasses
import threading
import types

import pytest
import torch
from torch import nn

import memopt
from memopt.memory.resident import storage_bytes
from tests.training.steps import gradients, peak_of


class Plain(nn.Module):
    """Layers that are not traced at all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(24, 24) for _ in range(3)])

    @torch.compiler.disable
    def forward(self, x):
        return self.work(x)

    def work(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


@dataclasses.dataclass
class Output:
    parts: list


class Wrapped(Plain):
    """Returns its loss within objects that torch does not know."""

    def work(self, x):
        hidden = [x]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]).tanh())
        return types.SimpleNamespace(inner=Output([{"loss": hidden[-1].square().mean()}, hidden[1:]]))


def loss_of(output):
    return output.inner.parts[0]["loss"] if isinstance(output, types.SimpleNamespace) else output


def step(call, x, calls=1):
    sum(loss_of(call(x if index == 0 else x + index)) for index in range(calls)).backward()


def eager_peak(model, x, calls=1):
    step(model, x, calls)
    model.zero_grad()
    taken = peak_of(lambda: step(model, x, calls), list(model.parameters()), x)
    model.zero_grad()
    return taken


@pytest.mark.parametrize("calls", [1, 2])
def test_tensors_in_objects_that_torch_does_not_know_are_outputs(calls):
    model, x = Wrapped(), torch.randn(64, 24)
    needed = eager_peak(model, x, calls)
    run = memopt.compile(model, 2 * needed, backend="aten")
    for _ in range(2):
        taken = peak_of(lambda: step(run, x, calls), list(model.parameters()), x)
        model.zero_grad()
        assert not run._memopt.earlier.alive()
    assert taken <= run.report.peak_bytes < 1.3 * taken
    with pytest.raises(memopt.BudgetError):
        step(memopt.compile(model, int(0.9 * needed), backend="aten"), x, calls)


def test_earlier_calls_of_a_captured_model_are_seen_in_such_outputs_too():
    class Captured(Plain):
        def forward(self, x):
            return Output([{"loss": self.work(x)}])

    model, x = Captured(), torch.randn(64, 24)
    run = memopt.compile(model, "1MB", backend="aten")
    first = run(x)
    assert len(run._memopt.earlier.alive()) == 1
    first.parts[0]["loss"].backward()
    assert not run._memopt.earlier.alive()


class Locked(Plain):
    """Breaks in the midst, and goes on: what little is captured is planned beside all the rest."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x):
        with self.lock:
            for layer in self.layers:
                x = self.apart(layer, x)
        return x.square().mean()

    def apart(self, layer, x):
        return layer(x).relu()


class Asks(Plain):
    """Looks at values after each layer, by way of what is large."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * 1.5
            x = x.relu() if (x.detach() * 2).abs().max().item() > 0 else -x
        return x.square().mean()


class Sparse(Plain):
    """Multiplies by a graph's edges."""

    def __init__(self, layout=torch.sparse_coo):
        super().__init__()
        dense = torch.rand(64, 64)
        dense = torch.where(dense > 0.9, dense, torch.zeros(()))
        edges = dense.to_sparse(layout=layout) if layout is not torch.sparse_coo else dense.to_sparse_coo()
        self.register_buffer("edges", edges)

    def forward(self, x):
        for layer in self.layers:
            x = torch.sparse.mm(self.edges, layer(x)).relu()
        return x.square().mean()


@pytest.mark.parametrize("make", [Locked, Asks, Sparse])
def test_what_eager_takes_is_enough(make):
    model, x = make(), torch.randn(64, 24)
    step(model, x)
    expected = gradients(model)
    model.zero_grad()
    budget = eager_peak(model, x) + storage_bytes(list(model.buffers())) + 6144
    run = memopt.compile(model, budget, backend="aten")
    step(run, x)
    for _ in range(2):
        model.zero_grad()
        taken = peak_of(lambda: step(run, x), list(model.parameters()), x)
        found = gradients(model)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    model.zero_grad()
    assert taken <= run.report.peak_bytes + 64 <= budget  # the loss
    with pytest.raises(memopt.BudgetError) as refused:
        step(memopt.compile(model, budget // 2, backend="aten"), x)
    assert refused.value.minimum_bytes <= budget and "test_eager_within.py:" in str(refused.value)


def test_what_asks_for_values_may_be_profiled():
    model, x = Asks(), torch.randn(40, 24)
    run = memopt.compile(model, "1MB", backend="aten")
    step(run, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        step(run, x[:33])
    assert "runs eagerly" in run.report.notes[-1]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_part_that_is_torchscripts_is_refused_in_a_line_and_runs_without_a_budget():
    class Scripted(Plain):
        def __init__(self):
            super().__init__()
            self.traced = torch.jit.trace(nn.Sequential(nn.Linear(24, 24), nn.ReLU()), torch.randn(2, 24))

        def forward(self, x):
            return self.traced(x).square().mean()

    model, x = Scripted(), torch.randn(64, 24)
    with pytest.raises(memopt.CaptureError, match="leave the budget out") as refused:
        step(memopt.compile(model, "1MB", backend="aten"), x)
    assert "\n" not in str(refused.value)
    step(memopt.compile(model, backend="aten"), x)
    assert all(parameter.grad is not None for parameter in model.traced.parameters())


def test_a_refusal_of_what_cannot_be_counted_says_why_and_what_to_do():
    class Drops(Plain):
        def work(self, x):
            return self.layers[0](x).mean() if torch.rand([]) < 0.5 else self.layers[1](x).mean()

    with pytest.raises(memopt.CaptureError, match=r"test_eager_within\.py:\d+.*random numbers.*: leave the budget out"):
        step(memopt.compile(Drops(), "1MB", backend="aten"), torch.randn(8, 24))


def test_what_is_disabled_and_runs_on_real_tensors_alone_is_refused_in_a_line():
    class Numbers(Plain):
        @torch.compiler.disable
        def forward(self, x):
            return self.work(x * float(x.detach().numpy().max()))

    with pytest.raises(memopt.CaptureError, match="leave the budget out") as refused:
        step(memopt.compile(Numbers(), "1MB", backend="aten"), torch.randn(8, 24))
    assert "\n" not in str(refused.value)


class Hooked(Plain):
    """In several graphs, and a hook that is not traced."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.layers[0].register_forward_hook(self.look)

    def look(self, *_):
        torch._dynamo.graph_break()
        self.seen.append(1)

    def forward(self, x):
        return self.work(x)


@pytest.mark.quick("False-Plain", "True-Locked", "True-Hooked")
@pytest.mark.parametrize("make", [Plain, Locked, Hooked])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_fraction_is_of_a_step_that_adds_to_gradients_where_steps_do(make, hooked):
    model, x, seen = make(), torch.randn(64, 24), []
    for parameter in model.parameters() if hooked else ():
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.shape))
    run = memopt.compile(model, 1.0, backend="aten")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def whole():
        for _ in range(3):
            step(run, x)
        optimizer.step()
        optimizer.zero_grad()

    whole()
    taken = peak_of(whole, model, x)
    assert taken <= run.report.budget_bytes < 1.15 * taken
    assert len(seen) == (6 * len(list(model.parameters())) if hooked else 0)
