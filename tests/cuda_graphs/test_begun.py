"""A captured step's forward begun before the call is known to be one for it: the same numbers, taken or in vain."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import memopt
from memopt.cuda_graphs.rollback import _MOST
from memopt.cuda_graphs.step import CudaGraphStep
from tests.cuda_graphs.test_trial import pytestmark, tape  # noqa: F401


class Net(nn.Module):
    """Dropout, a weight that is used twice, and a number that guards look at."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last, self.factor = nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 16), 1.0

    def forward(self, x):
        x = self.drop(torch.relu(self.first(x))) * self.factor
        return self.last(torch.tanh(self.first(x))).square().mean()


class Norms(Net):
    """Writes to buffers: statistics of a batch norm, and how many batches they are of."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return super().forward(self.norm(x))


class Filling(Net):
    """Writes to a buffer as large as asked for."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("filled", torch.zeros(size))

    def forward(self, x):
        self.filled.add_(1)
        return super().forward(x)


@pytest.fixture
def begun(monkeypatch):
    """Of each call that was to begin early whether it did, and of each that did whether that was taken."""
    found, begin, end = [], CudaGraphStep.begin, CudaGraphStep.end
    monkeypatch.setattr(CudaGraphStep, "begin", lambda self, given: found.append(begin(self, given)) or found[-1])

    def ended(self):
        found[-1] = "taken" if end(self) else "in vain"
        return found[-1] == "taken"

    monkeypatch.setattr(CudaGraphStep, "end", ended)
    return found


def batch(number=0, rows=32):
    return torch.linspace(-1, 1 + number, rows * 16).reshape(rows, 16)


def twice(act, begun, kind=Net):
    """What `act` sees of a compiled model that begins early, and of one that does not: the same, to the bit."""

    def seen():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = kind()
        found = []

        def step(x, zero=True):
            if zero:
                model.zero_grad()
            loss = run(x)
            loss.backward()
            found.extend([loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])

        run = memopt.compile(model, "1GB", backend="inductor")
        torch.manual_seed(1)
        for number in range(6):
            step(batch(number))
        early = len(begun)
        act(model, run, step)
        return [*found, torch.rand(3), *model.buffers()], begun[early:]

    ours, what = seen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaGraphStep, "begin", lambda self, given: False)
        theirs, _ = seen()
    assert len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return what


@pytest.mark.quick("Net")
@pytest.mark.parametrize("kind", [Net, Norms])
def test_steps_begin_early_and_have_the_same_numbers(tape, begun, kind):  # noqa: F811
    def act(model, run, step):
        for number in range(3):
            step(batch(number))

    assert twice(act, begun, kind) == ["taken"] * 3


@pytest.mark.quick("few")
@pytest.mark.parametrize("size", [8, 2 * _MOST], ids=["few", "many"])
def test_a_step_that_writes_more_than_a_little_never_does(tape, begun, size):  # noqa: F811
    twice(lambda model, run, step: [step(batch(n)) for n in range(3)], begun, lambda: Filling(size // 4))
    assert any(begun) is (size < _MOST)


def test_a_step_that_writes_to_what_the_caller_gives_never_does(tape, begun):  # noqa: F811
    class Writes(Net):
        def forward(self, x):
            x.add_(1)
            return super().forward(x)

    twice(lambda model, run, step: [step(batch(n)) for n in range(3)], begun, Writes)
    assert not any(begun)


def new_weight(model):
    model.first.weight = nn.Parameter(model.first.weight.detach().clone() + 1)


def weight_elsewhere(model):
    model.last.weight.data = model.last.weight.detach().clone() + 1


def another_factor(model):
    model.factor += 1


def frozen(model):
    model.last.bias.requires_grad_(False)
    model.last.bias.grad = None


@pytest.mark.quick("new_weight-Net", "weight_elsewhere-Norms", "frozen-Norms")
@pytest.mark.parametrize("kind", [Net, Norms])
@pytest.mark.parametrize("change", [new_weight, weight_elsewhere, another_factor, frozen])
def test_what_was_begun_in_vain_leaves_nothing(tape, begun, change, kind):  # noqa: F811
    def act(model, run, step):
        change(model)
        for number in range(2):
            step(batch(number))

    found = twice(act, begun, kind)[0]
    assert found == "in vain" or (change is new_weight and not found), "guards see at once that a weight is gone"


def test_gradients_that_are_held_are_not_written_over(tape, begun):  # noqa: F811
    def act(model, run, step):
        for number in range(3):  # they add up
            step(batch(number), zero=False)

    assert twice(act, begun)[0] in ("in vain", False)


def test_gradients_that_are_held_elsewhere_are_not_written_over(tape, begun):  # noqa: F811
    def act(model, run, step):
        held = [parameter.grad for parameter in model.parameters()]
        before = [gradient.clone() for gradient in held]
        model.zero_grad()
        step(batch(2))
        assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))

    assert twice(act, begun)[0] is False


def test_while_a_backward_is_to_come_nothing_begins(tape, begun):  # noqa: F811
    def act(model, run, step):
        model.zero_grad()
        first, second = run(batch(1)), run(batch(2))
        (first + second).backward()

    assert twice(act, begun) == ["taken", False]


@pytest.mark.long
def test_other_sizes_and_other_kinds_of_calls_come_between(tape, begun):  # noqa: F811
    def act(model, run, step):
        with torch.no_grad():
            run(batch(1))
        step(batch(2))
        step(batch(3, rows=16))
        step(batch(4))
        step(batch(5))

    twice(act, begun)


def test_another_thread_waits(tape, begun):  # noqa: F811
    def act(model, run, step):
        worker = threading.Thread(target=step, args=(batch(1),))
        worker.start()
        worker.join()
        step(batch(2))

    twice(act, begun)
