"""What a call that runs eagerly is counted by: values, random numbers, modules and settings."""

import contextlib
import copy
import random
import types

import pytest
import torch
from torch import nn

import memopt
from tests.calls.test_eager_within import Loop, Off, counted, stepped, total

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_what_a_model_makes_of_values_is_counted_at_every_call():
    class Masked(Loop):
        def forward(self, x):
            return super().forward(x[x[:, 0] > 0])

    model, x = Masked(), torch.ones(64, 16)
    x[4:] = -1
    run = memopt.compile(model, total(model, model, x) + 4096, backend="aten")
    stepped(run, x)
    model.zero_grad()
    with pytest.raises(memopt.BudgetError):
        stepped(run, -x)


def test_what_goes_by_random_numbers_of_torch_is_refused_as_a_real_run_draws_others():
    class Drops(Off):
        def work(self, x):
            for layer in self.layers:
                x = x if torch.rand([]) < 0.5 else layer(x).tanh()
            return x

    with pytest.raises(memopt.CaptureError):
        memopt.compile(Drops(), "1MB", backend="aten")(torch.randn(32, 16))


def test_what_goes_by_random_numbers_of_python_is_counted_at_every_call():
    class Drops(Off):
        def work(self, x):
            for layer in self.layers:
                x = layer(x).tanh() if random.random() < 0.5 else x
            return x * self.layers[0].weight[0, 0]

    model, x = Drops(12), torch.randn(256, 16)
    random.seed(0)
    depth = sum(random.random() < 0.5 for _ in range(12))
    random.seed(0)
    run = memopt.compile(model, counted(model, x), backend="aten")
    refused = False
    for seed in (0, 1, 2, 3, 4):
        random.seed(seed)
        deeper = sum(random.random() < 0.5 for _ in range(12)) > depth
        random.seed(seed)
        model.zero_grad()
        with pytest.raises(memopt.BudgetError) if deeper else contextlib.nullcontext():
            stepped(run, x)
        refused |= deeper
    assert refused


def test_what_modules_hold_beside_their_parameters_is_counted_and_their_objects_stay_as_they_are():
    class Holds(Off):
        def __init__(self):
            super().__init__()
            self.seen = types.SimpleNamespace(calls=0, states=[])

        def work(self, x):
            y = self.layers[0](x).tanh()
            self.seen.calls += 1
            self.seen.states.append(y.detach() + 1)
            self.seen.states[:-1] = []
            self.last = y.detach() * 2
            return y

    model, x = Holds(), torch.randn(64, 16)
    run = memopt.compile(model, 1.0, backend="aten")
    stepped(run, x)
    assert model.seen.calls == 1 and type(model.seen.states[0]) is torch.Tensor
    model.seen.states.clear()
    del model.last

    def steps(call, x):
        for _ in range(3):
            stepped(call, x)
            model.zero_grad()

    # In one recording, which does not see what was there before it go.
    needed = total(run, model, x, steps)
    assert model.seen.calls == 4 and len(model.seen.states) == 1
    assert needed <= run.report.budget_bytes <= needed + x.nbytes, "and the gradient of what is returned"


@pytest.mark.parametrize("change", ["autocast", "configuration"])
def test_what_a_call_goes_by_beside_its_inputs_is_counted_anew(change):
    class Goes(Off):
        def __init__(self):
            super().__init__()
            self.config = types.SimpleNamespace(times=1)

        def work(self, x):
            for layer in self.layers:
                for _ in range(self.config.times):
                    x = layer(x).tanh()
            return x

    model, x = Goes(), torch.randn(256, 16)
    run = memopt.compile(model, counted(model, x), backend="aten")
    stepped(run, x)
    model.zero_grad()
    model.config.times = 1 if change == "autocast" else 4
    cast = torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast")  # copies of weights are kept beside
    with cast, pytest.raises(memopt.BudgetError):
        stepped(run, x)


def test_a_forward_that_is_set_by_hand_reaches_no_gradient_of_the_model():
    model, x = Loop(), torch.randn(32, 16)
    twin = copy.deepcopy(model)
    model.forward = torch.compiler.disable(model.forward)  # a function around a method of the model
    with pytest.raises(memopt.BudgetError):
        memopt.compile(model, "3kB", backend="aten")(x)
    run = memopt.compile(model, "1MB", backend="aten")
    outputs, expected = run(x), twin(x)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(outputs, expected) and "runs eagerly" in run.report.notes[-1]
    outputs.sum().backward()
    expected.sum().backward()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_packed_sequences_are_counted_by_their_lengths():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.LSTM(4, 8, batch_first=True)

        @torch.compiler.disable
        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.cells(packed)[1][0]

    model, x, lengths = Packed(), torch.randn(4, 6, 4), torch.tensor([6, 2, 3, 1])
    run = memopt.compile(model, "1MB", backend="aten")
    found = run(x, lengths)
    assert torch.equal(found, model(x, lengths))
    assert "runs eagerly" in run.report.notes[-1]
