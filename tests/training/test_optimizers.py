"""Whole training loops, the optimizer's step and its state inside the budget, equal to eager's."""

from __future__ import annotations

import pytest
import torch

import memopt
from tests.training.steps import assert_equal, budget_for, bytes_of, loop, make, peak_of

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=False),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adafactor_foreach": lambda p: torch.optim.Adafactor(p, lr=1e-2, foreach=True),
}
QUICK = ("adamw_foreach", "adamw_fused", "sgd_momentum", "adafactor")


def cases(quick):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS]


@pytest.mark.quick("adamw_fused")
@pytest.mark.parametrize("name", cases(QUICK))
def test_a_training_loop_stays_inside_and_equals_eager_s(name):
    model, x = make(dropout=0.1)
    optimizer = OPTIMIZERS[name](model.parameters())
    budget = budget_for(model, (x,), 0.2, optimizer=optimizer)
    twin, _ = make(dropout=0.1)
    plain = OPTIMIZERS[name](twin.parameters())
    expected = loop(twin, plain, x), list(twin.parameters())
    run = memopt.compile(model, budget, optimizer=optimizer, backend="aten")
    assert_equal((loop(run, optimizer, x), list(model.parameters())), expected)
    assert len(optimizer.state) == len(list(model.parameters()))
    assert run.report.breakdown.optimizer_state == bytes_of(optimizer)
    measured = peak_of(lambda: loop(run, optimizer, x), model, optimizer, x)
    assert measured <= budget
    assert run.report.peak_bytes == pytest.approx(measured, rel=0.02)


class Wide(torch.nn.Module):
    """Weights that outweigh everything else: the optimizer's own step is the peak."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(96, 96) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


@pytest.mark.quick("adamw_foreach")
@pytest.mark.parametrize("name", cases(("adamw_foreach", "adafactor")))
def test_a_peak_in_the_optimizer_s_step_is_predicted_and_refused(name):
    torch.manual_seed(0)
    model, x = Wide(), torch.randn(4, 96)
    optimizer = OPTIMIZERS[name](model.parameters())
    budget = budget_for(model, (x,), 0.0, optimizer=optimizer)
    run = memopt.compile(model, budget, optimizer=optimizer, backend="aten")
    loop(run, optimizer, x, 2)
    measured = peak_of(lambda: loop(run, optimizer, x), model, optimizer, x)
    assert measured <= budget
    assert run.report.peak_bytes == pytest.approx(measured, rel=0.03)
    with pytest.raises(memopt.BudgetError) as caught:
        memopt.compile(model, int(measured * 0.9), optimizer=optimizer, backend="aten")(x)
    assert measured * 0.97 <= caught.value.minimum_bytes <= budget


def test_parameter_groups_schedules_and_frozen_layers():
    def prepare():
        model, x = make()
        model.layers[1].requires_grad_(False)
        groups = [{"params": model.layers.parameters(), "lr": 1e-2}, {"params": model.norm.parameters(), "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups)
        return model, x, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)

    def train(run, model, x, optimizer, schedule):
        for _ in range(3):
            loop(run, optimizer, x, 1)
            schedule.step()
        return [p.detach().clone() for p in model.parameters()]

    model, x, optimizer, schedule = prepare()
    expected = train(model, model, x, optimizer, schedule)
    model, x, optimizer, schedule = prepare()
    budget = budget_for(model, (x,), 0.2, optimizer=optimizer)
    run = memopt.compile(model, budget, optimizer=optimizer, backend="aten")
    assert_equal(train(run, model, x, optimizer, schedule), expected)
    assert peak_of(lambda: loop(run, optimizer, x), model, optimizer, x) <= budget


def test_a_reloaded_state_dict_goes_on_where_it_was():
    model, x = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    budget = budget_for(model, (x,), 0.2, optimizer=optimizer)
    run = memopt.compile(model, budget, optimizer=optimizer, backend="aten")
    loop(run, optimizer, x, 2)
    saved = {key: value.clone() for key, value in run.state_dict().items()}
    moments = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in _flat(optimizer)}
    loop(run, optimizer, x, 1)
    expected = [p.detach().clone() for p in model.parameters()]
    run.load_state_dict(saved)
    for key, value in _flat(optimizer):
        value.copy_(moments[key])
    loop(run, optimizer, x, 1)
    assert_equal(list(model.parameters()), expected)


def _flat(optimizer):
    return [((i, key), value) for i, state in enumerate(optimizer.state.values()) for key, value in state.items()]
