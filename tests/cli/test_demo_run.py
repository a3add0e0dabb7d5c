"""What the demo measures: whole steps with the optimizer in them, counted by storage."""

from __future__ import annotations

import torch

from memopt.cli.demo_run import gradient_error, gradients, measure_steps, resident_bytes, rounded_otherwise


class Tied(torch.nn.Module):
    """Two names of one weight, a buffer, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64, bias=False)
        self.second = torch.nn.Linear(64, 64, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(x).tanh()) + self.shift).square().mean()


X = torch.linspace(-1, 1, 32 * 64).reshape(32, 64)
WEIGHT = 64 * 64 * 4


def test_resident_bytes_count_each_storage_once() -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = {"x": X, "same": X[1:]}
    assert resident_bytes(model, optimizer, inputs) == WEIGHT + 256 + X.nbytes
    model(X).backward()
    optimizer.step()
    assert resident_bytes(model, optimizer, inputs) == 2 * WEIGHT + 256 + X.nbytes


def test_an_optimizer_without_state_holds_nothing() -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).backward()
    optimizer.step()
    optimizer.state[model.first.weight]["momentum_buffer"] = None
    assert resident_bytes(model, optimizer, {"x": X}) == WEIGHT + 256 + X.nbytes


def test_gradients_leave_none_behind_and_are_copies() -> None:
    model = Tied()
    found = gradients(model, {"x": X}, seed=0)
    assert list(found) == ["first.weight"] and model.first.weight.grad is None
    assert gradient_error(found, gradients(model, {"x": X}, seed=0)) == 0.0


def test_gradients_are_those_of_the_seed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5))
    model.forward = lambda x: torch.nn.Sequential.forward(model, x).square().mean()  # type: ignore[method-assign]
    first, again, other = (gradients(model, {"x": X}, seed) for seed in (0, 0, 1))
    assert gradient_error(first, again) == 0.0 and gradient_error(first, other) > 0.0


def test_a_model_that_is_rounded_otherwise_has_nearly_the_same_gradients() -> None:
    model = Tied()
    found = gradients(model, {"x": X}, seed=0)
    moved = rounded_otherwise(model, seed=0)
    assert 0.0 < gradient_error(found, gradients(moved, {"x": X}, seed=0)) < 1e-5
    assert gradient_error(found, gradients(model, {"x": X}, seed=0)) == 0.0  # it is a copy


def test_a_gradient_error_of_zeros_is_absolute() -> None:
    assert gradient_error({"w": torch.zeros(2)}, {"w": torch.tensor([0.0, 0.25])}) == 0.25
    assert gradient_error({"w": torch.ones(2)}, {"w": torch.tensor([1.0, torch.inf])}) == float("inf")


def test_a_measured_step_holds_gradients_and_the_optimizer_s_state() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    peak, seconds = measure_steps(model, optimizer, {"x": X}, seed=0)
    resident = 3 * WEIGHT + 256 + X.nbytes + 4  # two moments and a step count
    assert resident + WEIGHT < peak < resident + 8 * WEIGHT
    assert seconds > 0
    assert model.first.weight.grad is None and len(optimizer.state) == 1
    before = model.first.weight.detach().clone()
    measure_steps(model, optimizer, {"x": X}, seed=0)
    assert not torch.equal(model.first.weight, before), "the steps are real"
