"""Outputs that show one tensor with and without gradients are those of eager, gradients and memory too."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import memopt
from memopt.capture.export import CaptureError
from memopt.capture.facts import shared_memory

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


X = torch.linspace(-1, 1, 2 * 4).reshape(2, 4)


@dataclasses.dataclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


pytree.register_dataclass(Pair)


class Model(nn.Module):
    def __init__(self, returned) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.returned, self.linear = returned, nn.Linear(4, 8)
        self.register_buffer("seen", torch.arange(8.0))

    def forward(self, x):
        return self.returned(self, x, self.linear(x).sin())


def no_grad_view(self, x, y):
    with torch.no_grad():
        shown = y.t()
    return y, shown


def no_grad_view_alone(self, x, y):
    with torch.no_grad():
        return y.t(), y.sum()


def written_after(self, x, y):
    part, fixed = y[:, :3], y.detach()
    y.mul_(2)
    part.add_(1)
    return y, part, fixed.t()


def written_through(self, x, y):
    fixed = y.detach()
    fixed[0] = 1
    return y.t(), fixed.t()


def grad_again(self, x, y):
    with torch.no_grad():
        fixed = y.t()
        with torch.enable_grad():
            flowing = y.t()
        return flowing, fixed[1:]


def kept(self, x, y):
    self.last = y.detach()[:, 1:]
    return y.t(), y


def written_without_gradients(self, x, y):
    shown = y.detach()
    shown.add_(self.linear.bias.sum())
    return shown.t(), shown, shown[0]


def written_part_without_gradients(self, x, y):
    shown = y.data
    shown[0].mul_(self.linear.bias.sum())
    return shown[:, :3], shown[:, 3:]


RETURNED = {
    "slices": lambda self, x, y: (y[:, :4], y[:, 4:], y.detach()),
    "transposed": lambda self, x, y: (y.t(), y.detach().t()),
    "transposed_first_detached": lambda self, x, y: (y.detach().t(), y.t()),
    "both": lambda self, x, y: (y, y.detach()),
    "detached_first": lambda self, x, y: (y.detach(), y),
    "part_of_detached": lambda self, x, y: (y.detach()[:, :2], y),
    "views": lambda self, x, y: (y.view(-1), y.detach().view(2, 2, 4), y.view(16, 1)),
    "pieces": lambda self, x, y: (*y.chunk(2, 1), y.detach()),
    "all_pieces": lambda self, x, y: (*y.unbind(0), *y.detach().unbind(0)),
    "splits": lambda self, x, y: (*y.split([3, 5], 1), *y.detach().split([3, 5], 1)),
    "all": lambda self, x, y: (y, y.t(), y.detach(), y.detach().t(), y.detach().sum()),
    "dict": lambda self, x, y: {"a": y[0], "b": y.detach()[0], "c": [y, None, 3]},
    "dataclass": lambda self, x, y: Pair(y.t(), y.detach().t()),
    "data": lambda self, x, y: (y.t(), y.data.t()),
    "attributes": lambda self, x, y: (y.T, y.detach().mT, y.flatten()),
    "maybe_copies": lambda self, x, y: (y.contiguous().view(-1), y.detach().reshape(-1), y.detach().t().reshape(-1)),
    "same_twice": lambda self, x, y: (y, y, y.detach(), y.detach()),
    "product": lambda self, x, y: ((y @ y.t()).t(), (y @ y.t()).detach().t(), y),
    "parameters": lambda self, x, y: (self.linear.weight.t(), self.linear.weight.detach().t(), y),
    "buffers": lambda self, x, y: (self.seen.view(2, 4), self.seen.detach(), y),
    "inputs": lambda self, x, y: (x.t(), x.detach().t(), x[0], y),
    "no_grad_view": no_grad_view,
    "no_grad_view_alone": no_grad_view_alone,
    "grad_again": grad_again,
    "written_after": written_after,
    "written_through": written_through,
    "kept": kept,
    "copy": lambda self, x, y: (y.t(), y.detach().clone()),
    "written_without_gradients": written_without_gradients,
    "written_part_without_gradients": written_part_without_gradients,
}


def outcome(compiled, model, inputs_have_gradients):
    x = X.clone().requires_grad_(inputs_have_gradients)
    given = compiled(x)
    shown = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    shown += [model.last] if hasattr(model, "last") else []
    everything = [*shown, x, model.linear.weight, model.seen]
    keys = [tensor.untyped_storage().data_ptr() for tensor in everything]
    facts = [(t.requires_grad, t.is_leaf, tuple(t.shape), t.stride(), t.storage_offset()) for t in shown]
    values = [tensor.detach().clone() for tensor in shown]
    sum((index + 1) * tensor.square().sum() for index, tensor in enumerate(shown)).backward()
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return values, gradients, facts, [[a == b for a in keys] for b in keys]


@pytest.mark.quick("*-True")
@pytest.mark.parametrize("inputs_have_gradients", [False, True])
@pytest.mark.parametrize("name", RETURNED)
def test_outputs_are_those_of_eager(name, inputs_have_gradients):
    compare(name, "aten", inputs_have_gradients)


@pytest.mark.parametrize("name", ["slices", "transposed", "views"])
def test_outputs_of_compiled_code_are_those_of_eager(name):
    compare(name, "inductor", False)


def compare(name, backend, inputs_have_gradients):
    expected = Model(RETURNED[name])
    model = Model(RETURNED[name])
    compiled = memopt.compile(model, backend=backend)
    for _ in range(2):
        values, gradients, facts, aliases = outcome(expected, expected, inputs_have_gradients)
        found = outcome(compiled, model, inputs_have_gradients)
        torch.testing.assert_close(list(found[:2]), [values, gradients])
        assert found[2:] == (facts, aliases)


def test_within_a_budget_and_by_torch_compile():
    for make in (
        lambda model: memopt.compile(model, "1MB", backend="aten"),
        lambda model: torch.compile(model, backend="memopt", options={"backend": "aten"}),
        lambda model: torch.compile(model, backend="memopt", options={"backend": "aten"}, dynamic=True),
    ):
        torch._dynamo.reset()
        expected, model = Model(RETURNED["transposed"]), Model(RETURNED["transposed"])
        values, gradients, *facts = outcome(expected, expected, False)
        found = outcome(make(model), model, False)
        torch.testing.assert_close(list(found[:2]), [values, gradients])
        assert list(found[2:]) == facts


@pytest.mark.quick(
    "same_twice",
    "inputs",
    "buffers",
    "no_grad_view",
    "copy",
    "slices",
    "transposed",
    "written_through",
    "parameters",
    "attributes",
)
@pytest.mark.parametrize("name", RETURNED)
def test_without_gradients_too(name):
    without_gradients(name, "aten")


@pytest.mark.parametrize("backend", ["static", "onnxruntime"])
@pytest.mark.parametrize("name", ["slices", "transposed", "dict"])
def test_without_gradients_on_engines_with_memory_of_their_own(name, backend):
    if backend == "onnxruntime":
        pytest.importorskip("onnxruntime")
    without_gradients(name, backend)


def without_gradients(name, backend):
    expected, model = Model(RETURNED[name]), Model(RETURNED[name])
    compiled = memopt.compile(model, backend=backend)
    with torch.no_grad():
        for _ in range(2):
            found, wanted = (pytree.tree_leaves(run(X)) for run in (compiled, expected))
            torch.testing.assert_close(found, wanted)
            shared = [
                shared_memory({str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)})
                for leaves in (found, wanted)
            ]
            assert shared[0] == shared[1]


@pytest.mark.parametrize("inputs_have_gradients", [False, True])
@pytest.mark.parametrize("pieces", [lambda x: x.chunk(2, 1)[1], lambda x: x.unbind(0)[1], lambda x: x.split(3, 1)[-1]])
def test_pieces_of_an_input_that_is_written_to_show_the_input(pieces, inputs_have_gradients):
    def returned(self, x, y):
        with torch.no_grad():
            x[:, 1:].mul_(2)
        return pieces(x)[:1], pieces(x), self.linear(x).sin()

    expected, model = Model(returned), Model(returned)
    compiled = memopt.compile(model, backend="aten")
    for _ in range(2):
        values, gradients, *facts = outcome(expected, expected, inputs_have_gradients)
        found = outcome(compiled, model, inputs_have_gradients)
        torch.testing.assert_close(list(found[:2]), [values, gradients])
        assert list(found[2:]) == facts


@pytest.mark.parametrize("budget", [None, "1MB"])
def test_gradients_of_an_output_that_shows_elements_twice_are_added(budget: str | None) -> None:
    model = Model(lambda _, x, y: (y.unfold(1, 3, 2), y[:1].expand(3, 8), x))
    windows, rows, _ = model(X)
    (windows.sin().sum() + rows.cos().sum()).backward()
    expected, model.linear.weight.grad = model.linear.weight.grad, None
    windows, rows, _ = memopt.compile(model, budget, backend="aten")(X)
    (windows.sin().sum() + rows.cos().sum()).backward()
    torch.testing.assert_close(model.linear.weight.grad, expected)
    model.linear.weight.grad = None
    windows = memopt.compile(Model(lambda _, x, y: y.unfold(1, 3, 2)), backend="aten")
    windows(X).cumsum(2).sum().backward()
    found = windows.linear.weight.grad
    single = Model(lambda _, x, y: y.unfold(1, 3, 2))
    single(X).cumsum(2).sum().backward()
    torch.testing.assert_close(found, single.linear.weight.grad)


def _before(self, x, y):
    shown = y.detach()
    shown[..., 0] = self.linear.bias[0]
    return y, shown.t()


def _beside(self, x, y):
    one, other = y.detach(), y.data
    other.mul_(self.linear.bias.sum())
    return one, other


def _part(self, x, y):
    shown = y.detach()
    shown[0].mul_(self.linear.bias.sum())
    return y[:1], shown


@pytest.mark.parametrize("returned", [_before, _beside, _part])
@pytest.mark.parametrize("budget", [None, "1MB"])
def test_a_write_that_gives_one_of_two_views_another_gradient_is_refused(returned, budget):
    model = Model(returned)
    with pytest.raises(CaptureError, match=r"test_returned.py:\d+.*: writes what has a gradient.* clone\(\)"):
        memopt.compile(model, budget, backend="aten")(X)
