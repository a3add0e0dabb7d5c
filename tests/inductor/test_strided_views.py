"""Parts of tensors as Inductor has them: `as_strided` reads the whole, outputs and inputs are the model's."""

import pytest
import torch
from torch import nn

import memopt
from tests.inductor.test_peak_lower_bound import needs_compiler

SOURCE = torch.linspace(-1, 1, 8)


class Strided(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 8))

    def forward(self, x):
        y = x * self.weight
        beyond = y[:4].as_strided((2, 2), (2, 1), 2)
        among = y.view(2, 4)[1].sin() * y.view(2, 4)[1].as_strided((3,), (2,), 1)[1]
        return beyond * 2, beyond.chunk(2)[1], among, y[2:].as_strided((2, 2), (3, 1)).exp()


class Copied(nn.Module):
    """Inductor leaves copies out: what they are copies of lies elsewhere in its memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 8))

    def forward(self, x):
        y = (x * self.weight).view(2, 4)
        written = y[1].clone()
        written.as_strided((2,), (2,), 1).mul_(-1)
        there_and_back = x[4:].double().float().as_strided((2,), (1,), 2)
        return written * 1.5, x[4:].clone().as_strided((2,), (1,), 2) * y[0, :2], there_and_back + y[0, 0]


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 4))

    def forward(self, x):
        y = (x.view(2, 4) * self.weight).sin()
        columns = (x.view(4, 2) + 1).t().exp()
        return y[:, 1:3], y.detach().mT[1], columns.chunk(2, 1)[0], columns


@pytest.mark.quick("Strided-False", "Copied-True")
@needs_compiler
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", [Strided, Copied, Rows])
def test_views_are_those_of_the_model(kind, train):
    torch._dynamo.reset()
    model, found = kind(), []
    with torch.set_grad_enabled(train):
        for run in (model, memopt.compile(model, backend="inductor", verify=True)):
            model.zero_grad()
            outputs = run(SOURCE)
            if train:
                sum(output.square().sum() for output in outputs).backward()
            found.append(([o.detach().clone() for o in outputs], model.weight.grad, [o.stride() for o in outputs]))
    torch.testing.assert_close(found[1], found[0])


class TwiceWritten(nn.Module):
    """Backward and the caller need what a buffer holds between two writes to it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.tensor([-1.0, 2.0, -3.0, 4.0]))
        self.register_buffer("table", torch.ones(4, 2))

    def forward(self, x):
        first, second = x.view(2, 4).unbind(0)
        self.seen[0] = 0.4
        self.seen[1:2] *= 3
        y = second * (first + self.seen)
        torch.relu_(self.seen)
        self.table[torch.tensor([1])] = 5.0
        between = self.table.sin() * 1
        self.table.mul_(2)
        return y, y + self.seen, between


@needs_compiler
@pytest.mark.parametrize("budget", [None, "1MB"])
def test_what_an_input_holds_between_two_writes_is_kept(budget):
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        model = TwiceWritten()
        run = memopt.compile(model, budget, backend="inductor") if compiled else model
        for _ in range(2):
            x = SOURCE.clone().requires_grad_()
            outputs = run(x)
            outputs[0].square().sum().backward()
            found.append(([o.detach() for o in outputs], x.grad, model.seen.clone(), model.table.clone()))
    torch.testing.assert_close(found[2:], found[:2])
