"""Whether a model is only a part of what its step trains."""

import weakref

import pytest
import torch
from torch import nn

import memopt
from memopt.calls.part_of_step import is_part


def asked(model, *optimizers):
    return is_part(weakref.ref(model), lambda: optimizers)


def test_a_model_that_is_all_that_is_stepped_is_no_part():
    model = nn.Linear(2, 2)
    assert not asked(model) and not asked(model, torch.optim.SGD(model.parameters()))


def test_one_whose_optimizer_steps_others_too_is():
    model, head = nn.Linear(2, 2), nn.Linear(2, 2)
    assert asked(model, torch.optim.SGD([*model.parameters(), *head.parameters()]))


def test_a_cell_is():
    assert asked(nn.GRUCell(2, 2))


class Asks(nn.Module):
    """Asks of another module, or of itself, as it runs."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner

    def forward(self):
        return asked(self if self.inner is None else self.inner)


def test_one_that_another_module_calls_is():
    assert Asks(nn.Linear(2, 2))() and not Asks()()


class Standing(nn.Module):
    def __init__(self, model):
        super().__init__()
        self._memopt = memopt.compile(model)._memopt
        object.__setattr__(self, "model", model)

    def forward(self):
        return asked(self.model)


def test_its_own_stand_in_is_none_of_those():
    assert not Standing(nn.Linear(2, 2))()


def test_a_model_that_is_gone_is_none():
    assert not is_part(weakref.ref(nn.Linear(2, 2)), tuple)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.given, self.state = nn.Linear(32, 64), nn.Linear(64, 64)

    def forward(self, x, state):
        return torch.tanh(self.given(x) + self.state(state)) * torch.sigmoid(self.state(state))


def _peak(loop):
    """The peak of a step once all exists, and bytes there before it, of the last of some steps."""
    for _ in range(4):
        loop()
    return memopt.measure(loop).peak_bytes


@pytest.mark.quick("0.75")
@pytest.mark.parametrize("fraction", [0.9, 0.75])
def test_a_fraction_of_a_cell_is_of_all_its_calls(fraction):
    """Each call for itself has nothing to give: of six of them what is saved is most."""
    found = {}
    for budget in (None, fraction):
        torch._dynamo.reset()
        torch.manual_seed(0)
        cell, head, x = Cell(), nn.Linear(64, 1), torch.randn(256, 32)
        optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], 0.01)
        call = cell if budget is None else memopt.compile(cell, budget, optimizer=optimizer, backend="aten")
        losses = []

        def step(call=call, head=head, x=x, optimizer=optimizer, losses=losses):
            state = torch.zeros(256, 64)
            for part in range(6):
                state = call(x.roll(part, 1), state)
            loss = head(state).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        there = sum(p.nbytes for p in [*cell.parameters(), *head.parameters()]) * 2 + x.nbytes
        found[budget] = losses, there + _peak(step)
        if budget is not None:
            own = call.report.budget_bytes
    assert found[None][0] == found[fraction][0]
    eager, taken = found[None][1], found[fraction][1]
    assert own <= fraction * eager and taken <= fraction * eager
