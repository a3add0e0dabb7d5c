"""The Trainer's callback by its own events; `make test-integrations` runs it in the Trainer itself."""

import copy

import pytest
import torch
from torch import nn

import memopt
from memopt.in_place import stand_in_of

pytest.importorskip("transformers")
from memopt.integrations.hf import MemoptCallback


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, labels=None):
        return {"loss": self.layer(x).square().mean()}


class Wrapped:
    """Wraps an optimizer as accelerate does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self):
        self.optimizer.step()


def begin(callback, model, optimizer):
    callback.on_train_begin(None, None, None, model=model, optimizer=optimizer)


@pytest.mark.parametrize("before", [False, True])
def test_the_model_is_compiled_with_the_optimizer_of_the_training(before):
    model, x = Net(), torch.ones(2, 8)
    twin = copy.deepcopy(model)
    given = memopt.compile(model, "1MB", backend="aten") if before else model
    callback = MemoptCallback(budget="2MB", backend="aten")
    with pytest.raises(RuntimeError, match="training has not begun"):
        _ = callback.report
    callback.on_train_end(None, None, None)
    for make in (torch.optim.Adam, torch.optim.SGD):  # two trainings
        optimizer = make(model.parameters(), lr=0.1)
        own = make(twin.parameters(), lr=0.1)
        begin(callback, given, Wrapped(optimizer))
        for run, stepped in ((given, optimizer), (twin, own)):
            loss = run(x)["loss"]
            loss.backward()
            stepped.step()
            stepped.zero_grad()
        torch.testing.assert_close(model.layer.weight, twin.layer.weight, rtol=0, atol=0)
        state = callback.report.breakdown.optimizer_state
        assert state >= 2 * 288 if make is torch.optim.Adam else state == 0
    assert callback.report.budget_bytes == (10**6 if before else 2 * 10**6)
    callback.on_train_end(None, None, None)
    callback.undo()
    assert type(model) is Net and stand_in_of(model) is None


def test_another_training_s_callback_compiles_the_model_anew():
    model, x = Net(), torch.ones(2, 8)
    for budget in ("1MB", "2MB"):
        callback = MemoptCallback(budget=budget, backend="aten")
        begin(callback, model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(x)["loss"].backward()
        assert callback.report.budget_bytes == int(budget[0]) * 10**6


def test_what_the_callback_does_not_understand_is_refused_when_it_is_made():
    with pytest.raises(ValueError, match="what"):
        MemoptCallback(budget="20")
    with pytest.raises(TypeError, match="leave optimizer"):
        MemoptCallback(budget="1MB", optimizer=torch.optim.SGD)
