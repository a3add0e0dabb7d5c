"""What runs outside of captured graphs is told in the report, whether it was called, trained or only planned."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import memopt
from memopt.capture.outside import OUTSIDE

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Part(nn.Module):
    """A layer that is captured wherever it is called from."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).tanh()


class Locked(nn.Module):
    """Dynamo gives forward up at the lock: half of it is one graph, the rest eager."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.lock = Part(), nn.Linear(8, 8), threading.Lock()

    def forward(self, x):
        x = self.first(x)
        with self.lock:
            return self.second(x).exp()


class LockedFirst(nn.Module):
    """Dynamo gives forward up before anything is captured; the layer it calls is a graph."""

    def __init__(self):
        super().__init__()
        self.layer, self.lock = Part(), threading.Lock()

    def forward(self, x):
        with self.lock:
            x = x.exp()
        return self.layer(x)


class Recurrent(nn.Module):
    """An RNN between layers: all of it is captured."""

    def __init__(self):
        super().__init__()
        self.first, self.rnn, self.last = Part(), nn.GRU(8, 8, batch_first=True), Part()

    def forward(self, x):
        return self.last(self.rnn(self.first(x))[0])


class Disabled(nn.Module):
    """A method that torch.compile is told to leave alone."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Part(), Part()

    @torch.compiler.disable
    def between(self, x):
        return x.exp()

    def forward(self, x):
        return self.last(self.between(self.first(x)))


class Told(nn.Module):
    """A break at which nothing is computed."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Part(), Part()

    def forward(self, x):
        x = self.first(x)
        print("in between")
        return self.last(x)


CASES = [
    (Locked, "forward, test_outside.py:", "Exp"),
    (LockedFirst, "forward, test_outside.py:", None),
    (Recurrent, None, None),
    (Disabled, "forward, test_outside.py:", "operations Exp"),
    (Told, None, None),
    (Part, None, None),
]


def told(run):
    notes = [note for note in run.report.notes if note.startswith(OUTSIDE)]
    assert len(notes) <= 1 and not any("\n" in note for note in notes)
    return notes[0].removeprefix(OUTSIDE) if notes else None


def check(run, place, operations):
    if place is None:
        assert told(run) is None
    else:
        assert place in told(run) and (operations or "") in told(run)


@pytest.mark.quick(
    "Told-None-None-aten",
    "Part-None-None-aten",
    "LockedFirst-forward, test_outside.py:-None-aten",
    "Part-None-None-inductor",
)
@pytest.mark.parametrize("backend", ["aten", "inductor"])
@pytest.mark.parametrize(("kind", "place", "operations"), CASES)
def test_a_step_says_what_of_it_was_not_captured(kind, place, operations, backend):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 3, 8)
    run = memopt.compile(model, "1GB", backend=backend)
    for _ in range(2):
        run(x).sum().backward()  # with gradients to be added to it is planned anew
        check(run, place, operations)
    run = memopt.compile(kind(), "1GB", backend=backend)  # Dynamo does not try the class anew
    run(x).sum().backward()
    check(run, place, operations)


@pytest.mark.parametrize(("kind", "place", "operations"), [case for case in CASES if case[0] is not Told])
def test_inference_and_plans_say_so_too(kind, place, operations):
    x = torch.randn(2, 3, 8)
    run = memopt.compile(kind().eval(), "1GB", backend="aten")
    with torch.no_grad():
        run(x)
    check(run, place, None)
    run = memopt.compile(kind(), "1GB", example_inputs=x, backend="aten")
    check(run, place, operations)


def test_operations_before_and_after_the_model_are_not_its_own():
    model = Part()
    run = memopt.compile(model, "1GB", backend="aten")
    x = torch.randn(2, 3, 8, requires_grad=True)
    run(x.exp()).sin().sum().backward()
    assert told(run) is None


def test_views_and_changed_inputs_are_no_operations():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            y = x + self.weight
            x.mul_(2)
            return y.t(), self.weight.view(2, 2), x.view(-1), x[0]

    run = memopt.compile(Views(), "1GB", backend="aten")
    x = torch.randn(2, 4, requires_grad=True)
    run(x.sin())[0].sum().backward()
    assert told(run) is None


class Looped(nn.Module):
    """Parts in a loop, which Dynamo gives up where their hooks break the graph."""

    def __init__(self, hooked):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))
        for part in self.parts if hooked else ():
            part.register_forward_hook(torch.compiler.disable(lambda *_: None))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Around(nn.Module):
    """Calls another model and nothing else."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def told_of(model):
    """What is said of a model of its own, compiled and trained for a step."""
    run = memopt.compile(model, "1GB", backend="aten")
    run(torch.randn(2, 3, 8)).sum().backward()
    return told(run), len(run.report.programs)


def test_what_was_given_up_of_one_model_is_not_said_of_another_that_is_captured():
    def forward(model):
        return f"forward, test_outside.py:{type(model).forward.__code__.co_firstlineno}"

    hooked, plain = Looped(True), Looped(False)
    said, programs = told_of(hooked)
    assert programs == 2 and said.startswith(forward(hooked))
    assert told_of(Around(plain)) == (None, 1)
    said, programs = told_of(plain)  # Dynamo does not try its class anew
    assert programs == 2 and said.startswith(forward(plain))
    torch._dynamo.reset()
    assert told_of(Looped(False)) == (None, 1)
    assert told_of(Around(Looped(False))) == (None, 1)


def test_what_was_given_up_within_another_model_is_said_of_the_next():
    for _ in range(2):
        said, _ = told_of(Around(LockedFirst()))
        assert "forward, test_outside.py:" in said
    said, _ = told_of(LockedFirst())
    assert "forward, test_outside.py:" in said
