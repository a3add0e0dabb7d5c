"""Writes through views that no graph can hold are refused; all others are made."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt
from memopt.capture.export import CaptureError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


X = torch.linspace(-1, 1, 2 * 6).reshape(2, 6)


class Model(nn.Module):
    def __init__(self, write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write, self.linear = write, nn.Linear(6, 6)
        self.register_buffer("seen", torch.arange(6.0) + 1)

    def forward(self, x):
        y = self.linear(x) * 1
        z = self.write(self, x, y)
        return y.square().sum() + self.seen.sum() + (0 if z is None else z.square().sum())


def without_gradient(self, x, y):
    with torch.no_grad():
        y.unfold(1, 1, 5).mul_(2)


def item(self, x, y):
    y.unfold(1, 1, 5)[...] = 7


def rows(self, x, y):
    first, _ = torch.meshgrid(y[0], y[1], indexing="ij")
    first[0] = 1


LOST = {
    "gaps": lambda self, x, y: y.unfold(1, 1, 5).mul_(2),
    "a_rest": lambda self, x, y: y.unfold(1, 4, 4).mul_(2),
    "overlaps": lambda self, x, y: y.unfold(1, 3, 1).add_(1),
    "part_of_a_window": lambda self, x, y: y.unfold(1, 2, 3)[:, 0].add_(1),
    "detached": lambda self, x, y: y.detach().unfold(1, 1, 5).mul_(2),
    "data": lambda self, x, y: y.data.unfold(1, 1, 5).mul_(2),
    "without_gradient": without_gradient,
    "item": item,
    "function": lambda self, x, y: F.relu(y.unfold(1, 1, 5), inplace=True),
    "list": lambda self, x, y: torch._foreach_mul_([y.unfold(1, 1, 5)], 2),
    "mask": lambda self, x, y: y.unfold(1, 1, 5).masked_fill_(torch.ones(2, 2, 1, dtype=torch.bool), 5.0),
    "copy": lambda self, x, y: y.unfold(1, 1, 5).copy_(x.unfold(1, 1, 5)),
    "operator": lambda self, x, y: torch.ops.aten.mul_.Tensor(y.unfold(1, 1, 5), 2),
    "view_before": lambda self, x, y: y.t()[1:].t().unfold(1, 1, 4).mul_(2),
    "buffer": lambda self, x, y: self.seen.unfold(0, 1, 5).mul_(2),
    "input": lambda self, x, y: x.unfold(1, 1, 5).mul_(2),
    "strided_overlaps": lambda self, x, y: y.as_strided((3, 2, 2), (1, 1, 6)).add_(1),
    "strided_view": lambda self, x, y: y[1:].as_strided((1, 3), (6, 1), 0).mul_(2),
    "expanded": lambda self, x, y: y[:1].expand(4, 6).add_(1),
    "broadcast": lambda self, x, y: torch.broadcast_to(y[:1], (4, 6)).add_(1),
    "meshgrid": rows,
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", LOST)
def test_a_write_that_would_be_lost_is_refused_before_anything_is_run(name, training):
    model, x = Model(LOST[name]), X.clone()
    with torch.set_grad_enabled(training), pytest.raises(CaptureError) as refused:
        memopt.compile(model, backend="aten")(x)
    message = str(refused.value)
    assert "test_writes.py:" in message and "y[:, [0, 5]] *= 2" in message and "\n" not in message
    assert torch.equal(x, X) and torch.equal(model.seen, torch.arange(6.0) + 1)


def test_a_budget_and_torch_compile_refuse_it_too():
    with pytest.raises(CaptureError, match="unfold"):
        memopt.compile(Model(LOST["gaps"]), "1MB", backend="aten")(X)
    with pytest.raises(CaptureError, match="unfold"):
        memopt.compile(Model(LOST["gaps"]), backend="aten", example_inputs=(X,))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="unfold"):
        torch.compile(Model(LOST["gaps"]), backend="memopt", options={"backend": "aten"})(X)


def transposed_rows(self, x, y):
    square = y[:, :2].detach()
    square.mT[torch.tensor([0, -1])] = square[0]


READ = {
    "itself": lambda self, x, y: y.masked_scatter_(y > 0, y),
    "a view": lambda self, x, y: y[0].masked_scatter_(y[0] > 0, y.view(-1)[3:]),
    "transposed": lambda self, x, y: y.t().masked_scatter_(y.t() > 0, y),
    "an input": lambda self, x, y: x.masked_scatter_(x > 0, x),
    "shifted": lambda self, x, y: y[:, 1:].add_(y[:, :-1]),
    "shifted copy": lambda self, x, y: y[:, 1:].copy_(y[:, :-1]),
    "assigned": lambda self, x, y: y.__setitem__((slice(None), slice(2, None)), y[:, 1:-1]),
    "detached": lambda self, x, y: y.detach()[:, 1:].sub_(y[:, :-1]),
    "a buffer": lambda self, x, y: self.seen.view(2, 3)[:, 1:].mul_(self.seen.view(2, 3)[:, :-1]),
    "by index": lambda self, x, y: y.t().index_copy_(0, torch.tensor([0, 1]), y.t()[1:3]),
    "by index of rows": transposed_rows,
    "list": lambda self, x, y: torch._foreach_add_([y[:, 1:]], [y[:, :-1]]) and None,
}


@pytest.mark.parametrize("name", READ)
def test_what_reads_what_it_has_written_is_refused(name):
    x = X.clone()
    with pytest.raises(CaptureError, match=r"test_writes.py:.* reads what it writes.*clone"):
        memopt.compile(Model(READ[name]), backend="aten")(x)
    assert torch.equal(x, X)


def scattered(self, x, y):
    z = y.new_zeros(2, 8)
    z.as_strided((2, 6), (8, 1), 1).copy_(y)
    return z


MADE = {
    "windows_that_tile": lambda self, x, y: y.unfold(1, 2, 2).mul_(2),
    "one_window": lambda self, x, y: y.unfold(1, 6, 7).mul_(2),
    "columns": lambda self, x, y: y[:, [0, 5]].mul_(2),
    "steps": lambda self, x, y: y[:, ::3].mul_(2),
    "transposed_steps": lambda self, x, y: y.t()[::2, 1].mul_(2),
    "diagonal": lambda self, x, y: y.view(3, 4).diagonal(1).zero_(),
    "strided_gaps": lambda self, x, y: y.as_strided((2, 3), (6, 2)).mul_(2),
    "strided_buffer": lambda self, x, y: self.seen.as_strided((2,), (5,)).add_(1),
    "scattered": scattered,
    "one_expanded": lambda self, x, y: y.unsqueeze(0).expand(1, 2, 6).mul_(2),
    "copy_of_windows": lambda self, x, y: y.unfold(1, 1, 5).clone().mul_(2),
    "windows_read": lambda self, x, y: y.mul_(2).unfold(1, 3, 1),
    "under_vmap": lambda self, x, y: torch.vmap(lambda row: row.unfold(0, 1, 5).clone().mul_(2))(y),
    "buffer_steps": lambda self, x, y: self.seen[::5].fill_(3.0),
    "taken_from_a_copy": lambda self, x, y: y.masked_scatter_(y > 0, y.clone()),
    "taken_from_other_rows": lambda self, x, y: y[0].masked_scatter_(y[0] > 0, y[1]),
    "every other": lambda self, x, y: y[:, ::2].add_(y[:, 1::2]),
    "the other half": lambda self, x, y: y[:, :3].copy_(y[:, 3:]),
    "swapped": lambda self, x, y: y[:, :3].add_(y[:, 3:].clone()),
    "its own places": lambda self, x, y: y[:, 1:].add_(y[:, 1:]),
    "one number of it": lambda self, x, y: y[:, 1:].fill_(y[0, 2]),
    "narrowed": lambda self, x, y: y.narrow(1, 1, 3)[:, ::2].sub_(1),
}


@pytest.mark.parametrize("name", MADE)
def test_other_writes_are_made(name):
    found = []
    for make in (lambda model: model, lambda model: memopt.compile(model, backend="aten")):
        model = Model(MADE[name])
        loss = make(model)(X)
        loss.backward()
        found.append([loss, model.linear.weight.grad, model.seen])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("backend", ["aten", "static"])
@pytest.mark.parametrize("name", ["scattered", "strided_gaps", "strided_buffer", "diagonal"])
def test_other_writes_are_made_without_gradients(name, backend):
    expected, found = Model(MADE[name]), Model(MADE[name])
    with torch.no_grad():
        compiled = memopt.compile(found, backend=backend)
        for _ in range(2):
            torch.testing.assert_close(compiled(X), expected(X))
    torch.testing.assert_close(found.seen, expected.seen)
