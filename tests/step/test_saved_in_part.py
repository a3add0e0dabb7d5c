"""What is saved for a part of a step may be written to where that part has no gradient, as in eager."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.backends.inductor import missing_compiler

COMPILER = missing_compiler(torch.device("cpu")) is None
ENGINES = ["aten", pytest.param("inductor", marks=pytest.mark.skipif(not COMPILER, reason="no C++ compiler"))]


class Heads(nn.Module):
    """Two heads: one that the loss uses, and one whose layers read weights, the batch and the other head."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.used, self.other, self.breaks = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), breaks

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        used = self.used(x) * 0.5
        hidden = self.other(y).sigmoid()
        if self.breaks:
            torch._dynamo.graph_break()
        return used, self.other(used) * hidden, hidden


WRITES: dict[str, Callable[[nn.Module, Any, Any], Any]] = {
    "the head that is used": lambda model, given, out: out[0].mul_(2),
    "the head that is not used": lambda model, given, out: out[1].zero_(),
    "a saved head": lambda model, given, out: out[2].zero_(),
    "the batch": lambda model, given, out: given[1].add_(1),
    "a parameter": lambda model, given, out: model.other.weight.mul_(2),
}


def _gradients(called: Any, model: nn.Module, write: Callable[[nn.Module, Any, Any], Any], times: int) -> list[Any]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    given = [torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(-2, 1, 12).reshape(3, 4)]
    model.zero_grad()
    out = called(*given)
    with torch.no_grad():
        write(model, given, out)
    loss = out[0].square().sum()
    for _ in range(times):
        loss.backward(retain_graph=times > 1)
    model.load_state_dict(state)
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.quick("whole-aten")
@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
def test_what_the_loss_does_not_need_may_be_written_to(backend: str, breaks: bool) -> None:
    torch.manual_seed(0)
    model = Heads(breaks=breaks)
    compiled = memopt.compile(model, backend=backend)
    for name, write in WRITES.items():
        for times in (1, 2):
            expected = _gradients(model, model, write, times)
            found = _gradients(compiled, model, write, times)
            assert found[2] is None, name
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", ENGINES)
def test_what_the_loss_needs_may_not(backend: str) -> None:
    torch.manual_seed(0)
    model = Heads()
    compiled = memopt.compile(model, backend=backend)
    for write in (WRITES["the batch"], WRITES["a parameter"]):
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        out = compiled(x, y)
        with torch.no_grad():
            write(model, (x, y), out)
        loss = out[1].sum()
        with pytest.raises(RuntimeError, match=r"between forward and backward|modified by an inplace operation"):
            loss.backward()


@pytest.mark.quick("whole")
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
def test_what_is_looked_at_lives_no_longer_than_the_call_s_outputs(breaks: bool) -> None:
    model = Heads(breaks=breaks)
    compiled = memopt.compile(model, backend="aten")
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    compiled(x, y)
    out = compiled(x, y)
    seen = [weakref.ref(value) for value in out]
    del out
    assert [value() for value in seen] == [None] * 3


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda r: self.linear(r).sigmoid(), x, use_reentrant=False)


@pytest.mark.parametrize("backend", ENGINES)
def test_a_write_to_what_eager_recomputes_is_no_wrong_gradient(backend: str) -> None:
    """Eager recomputes what the user's checkpoint returned: a plan that saves it says so in one line."""
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(3, 4)
    (expected,) = torch.autograd.grad(model(x).sum(), [model.linear.bias])
    out = memopt.compile(model, backend=backend)(x)
    with torch.no_grad():
        out.mul_(2)
    try:
        out.sum().backward()
    except RuntimeError as error:
        assert "between forward and backward" in str(error)
        assert len(str(error).splitlines()) == 1
    else:
        torch.testing.assert_close(model.linear.bias.grad, expected)


class Largest(nn.Module):
    """A head whose derivative is infinite once it is written to: what equals the largest is counted, and none does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x).sin()
        return y, y.amax(-1)


@pytest.mark.quick("aten")
@pytest.mark.parametrize("backend", ENGINES)
def test_gradients_that_such_a_write_makes_infinite_are_refused(backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Largest(), torch.linspace(-1, 1, 12).reshape(3, 4)
    call = memopt.compile(model, backend=backend)
    found = []
    for called, write in ((model, True), (call, False), (call, True)):
        model.zero_grad()
        used, largest = called(x)
        with torch.no_grad():
            largest.mul_(7.0 if write else 1.0)
        try:
            used.square().sum().backward()
            found.append(model.linear.weight.grad)
        except RuntimeError as error:
            assert write and "changed between forward and backward" in str(error)
    for gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0])
    assert len(found) > 2 or backend == "aten"
