"""What a loop makes of outputs before backward is inside the budget in the first step, in which it is not known yet."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

import memopt
from memopt.step import recomputed_calls
from tests.training.steps import peak_of

ROWS, WIDTH = 256, 24


class Features(nn.Module):
    """Layers whose outputs are small beside what is saved and what a loss makes of them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.dropout(functional.gelu(layer(x)).tanh())
        return self.norm(x)


def _pairs(call, x):
    rows = functional.normalize(call(x), dim=-1)
    return functional.cross_entropy(rows @ rows.t() / 0.1, torch.arange(len(rows)))


def _head(call, x):
    torch.manual_seed(1)
    return functional.cross_entropy(call(x) @ torch.randn(WIDTH, 160), torch.arange(len(x)) % 160)


def _passes(call, x):
    one, two = call(x), call(x)
    return functional.kl_div(one.log_softmax(-1), two.softmax(-1), reduction="batchmean") + one.square().mean()


def _twice(call, x):
    out = call(x)
    functional.cross_entropy(out.repeat(1, 5), torch.arange(len(out)) % 120).backward(retain_graph=True)
    return out.square().mean()


LOOPS = {"pairs": _pairs, "head": _head, "passes": _passes, "twice": _twice}


def stepped(loop, model, call, x):
    torch.manual_seed(2)
    model.zero_grad()
    loss = loop(call, x)
    loss.backward()
    return loss.detach()


def plans(loop, share, dropout=0.0):
    """A model that is planned for a share of eager's peak, and has not run; its input, the budget, one like it."""
    torch.manual_seed(0)
    model, twin, x = Features(dropout), Features(dropout), torch.randn(ROWS, WIDTH)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    stepped(loop, model, model, x)
    budget = int(share * peak_of(lambda: stepped(loop, model, model, x), model, x))
    model.load_state_dict(state)
    twin.load_state_dict(state)
    model.zero_grad()
    torch._dynamo.reset()
    return model, memopt.compile(model, budget, backend="aten", example_inputs=(x,)), x, budget, twin


@pytest.mark.quick("head", "twice")
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_was_not_seen_yet_is_inside_the_budget(loop, caplog):
    model, call, x, budget, _ = plans(LOOPS[loop], 0.85)
    with caplog.at_level(logging.WARNING, "memopt"):
        for _ in range(3):
            assert peak_of(lambda: stepped(LOOPS[loop], model, call, x), model, x) <= budget
    assert "over its budget" not in caplog.text


def test_what_is_let_go_of_once_is_held_by_the_steps_that_know_their_loop():
    _, call, x, _, _ = plans(_head, 0.85)
    dropped = []
    for _ in range(3):
        loss = _head(call, x)
        dropped.append([ran.dropped for ran in call._memopt.sessions.earlier.alive()])
        loss.backward()
    assert dropped == [[True], [False], [False]]


class WithLoss(Features):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = super().forward(x)
        return out.square().mean(), out


def test_a_model_that_returns_its_loss_lets_go_of_nothing():
    torch._dynamo.reset()
    call, x = memopt.compile(WithLoss(), "1GB", backend="aten"), torch.randn(ROWS, WIDTH)
    loss, _ = call(x)
    assert [ran.dropped for ran in call._memopt.sessions.earlier.alive()] == [False]
    loss.backward()


def test_numbers_are_those_of_eager_where_the_first_step_recomputes():
    model, call, x, _, twin = plans(_head, 0.85, dropout=0.2)
    ours = [stepped(_head, model, call, x) for _ in range(2)]
    eager = [stepped(_head, twin, twin, x) for _ in range(2)]
    assert ours == eager
    for one, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


class Masked(Features):
    def forward(self, x: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        return super().forward(x + masked.float() * 3)


@pytest.mark.parametrize("copied", [recomputed_calls._MOST_COPIED, 1000], ids=["few bytes", "many"])
def test_inputs_that_eager_does_not_read_again_may_be_changed_before_backward(copied, monkeypatch):
    monkeypatch.setattr(recomputed_calls, "_MOST_COPIED", copied)
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(ROWS, WIDTH)
    found = []
    for budget in (None, "1GB"):
        torch._dynamo.reset()
        model.zero_grad()
        call = model if budget is None else memopt.compile(model, budget, backend="aten")
        masked = (x > 1).to(torch.uint8)
        loss = call(x, masked).square().mean()
        masked.zero_()
        loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
