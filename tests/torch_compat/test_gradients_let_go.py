"""Gradients that compiled backward begins with: they go once it has read them, unless somebody else has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memopt.torch_compat.aot_autograd import aot_autograd
from memopt.torch_compat.autograd_nodes import gradients_are_held, when_run
from memopt.torch_compat.boxed import boxed

Shown = torch.UntypedStorage


def compiled(function: Callable[..., Any], freed: list[list[bool]]) -> Any:
    """The function, whose compiled backward notes which of its gradients go as it lets go of them."""

    def forward(module: Any, inputs: Any) -> Any:
        return boxed(lambda values: module(*values))

    def backward(module: Any, inputs: Any) -> Any:
        names = [node.name for node in module.graph.find_nodes(op="placeholder")]
        places = [place for place, name in enumerate(names) if name.startswith("tangents")]

        def run(values: list[Any]) -> Any:
            results = module(*values)
            memory = [values[place].untyped_storage()._weak_ref() for place in places]
            values.clear()
            freed.append([Shown._expired(each) for each in memory])
            return results

        return boxed(run)

    torch._dynamo.reset()
    return torch.compile(function, backend=aot_autograd(fw_compiler=forward, bw_compiler=backward))


def sines(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sin(), x.cos()


def turned(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x.sin(), x.cos())


X = torch.linspace(0, 1, 6).reshape(2, 3)
LOSSES: dict[str, tuple[Any, Callable[..., torch.Tensor]]] = {
    "alone": (sines, lambda y: y.square().sum()),
    "a view": (sines, lambda y: y.view(3, 2).square().sum()),
    "a transposed view": (sines, lambda y: y.t().contiguous().exp().sum()),
    "two": (pair, lambda y: (y[0] * y[1]).sum()),
    "one for both": (pair, lambda y: (y[0] + y[1]).square().sum()),
    "a conjugate": (turned, lambda y: (y.conj() * (y + 1)).real.square().sum()),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])  # there in another thread
@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_that_nobody_else_has_goes_once_it_was_read(name: str, device: str) -> None:
    function, loss = LOSSES[name]
    freed, given = list[list[bool]](), X.to(device)
    x, eager = given.clone().requires_grad_(), given.clone().requires_grad_()
    run = compiled(function, freed)
    for _ in range(2):
        loss(run(x)).backward()
        loss(function(eager)).backward()
        torch.testing.assert_close(x.grad, eager.grad)
    assert freed and all(freed) and {each for one in freed for each in one} == {not gradients_are_held()}


def _kept_by_a_hook(y: torch.Tensor, kept: list[torch.Tensor]) -> None:
    y.register_hook(kept.append)
    y.square().sum().backward()


def _kept_by_a_hook_as_a_view(y: torch.Tensor, kept: list[torch.Tensor]) -> None:
    y.register_hook(lambda gradient: kept.append(gradient[1:]))
    y.square().sum().backward()


def _kept_by_a_hook_of_the_node(y: torch.Tensor, kept: list[torch.Tensor]) -> None:
    y.grad_fn.register_hook(lambda _, gradients: kept.extend(gradients))  # type: ignore[union-attr]
    y.square().sum().backward()


def _given_by_the_caller(y: torch.Tensor, kept: list[torch.Tensor]) -> None:
    kept.append(torch.full((2, 3), 3.0))
    y.backward(kept[0])


def _asked_for(y: torch.Tensor, kept: list[torch.Tensor]) -> None:
    z = y * 1
    kept.extend(torch.autograd.grad(z.square().sum(), (y,), retain_graph=True))
    z.square().sum().backward()


def _retained(y: torch.Tensor, kept: list[torch.Tensor]) -> None:
    y.retain_grad()
    y.square().sum().backward()
    kept.append(y.grad)  # type: ignore[arg-type]


class _Keeps(torch.autograd.Function):
    kept: torch.Tensor

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        _Keeps.kept = gradient * 2
        return _Keeps.kept


def _kept_by_a_function(y: torch.Tensor, kept: list[torch.Tensor]) -> None:
    _Keeps.apply(y).square().sum().backward()  # type: ignore[no-untyped-call]
    kept.append(_Keeps.kept)


def _another_leafs_too(y: torch.Tensor, kept: list[torch.Tensor]) -> None:
    other = torch.zeros(2, 3, requires_grad=True)
    (y + other).square().sum().backward()
    kept.append(other.grad)  # type: ignore[arg-type]


def _another_nodes_too(y: torch.Tensor, kept: list[torch.Tensor]) -> None:
    other = torch.zeros(2, 3, requires_grad=True)
    (y + other.exp() - 1).square().sum().backward()
    kept.append(other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "use",
    [
        _kept_by_a_hook,
        _kept_by_a_hook_as_a_view,
        _kept_by_a_hook_of_the_node,
        _given_by_the_caller,
        _asked_for,
        _retained,
        _kept_by_a_function,
        _another_leafs_too,
        _another_nodes_too,
    ],
)
def test_one_that_somebody_else_has_stays_as_it_is(use: Callable[..., None]) -> None:
    x, eager = X.clone().requires_grad_(), X.clone().requires_grad_()
    run = compiled(sines, [])
    for _ in range(3):
        kept, expected = list[torch.Tensor](), list[torch.Tensor]()
        use(run(x), kept)
        use(sines(eager), expected)
        torch.testing.assert_close(x.grad, eager.grad)
        torch.testing.assert_close(kept, expected)


def test_a_graph_of_gradients_is_made_as_ever() -> None:
    x, eager = X.clone().requires_grad_(), X.clone().requires_grad_()
    run = compiled(sines, [])
    (found,) = torch.autograd.grad(run(x).square().sum(), (x,), create_graph=True)
    (expected,) = torch.autograd.grad(sines(eager).square().sum(), (eager,), create_graph=True)
    torch.testing.assert_close(found, expected)
    assert found.requires_grad


def test_backward_that_fails_leaves_nothing_behind() -> None:
    said, x = list[str](), X.clone().requires_grad_()
    run = compiled(sines, [])
    y = run(x)
    when_run(y.grad_fn, lambda: said.append("run"))
    with pytest.raises(RuntimeError):
        y.backward(torch.ones(5))
    assert said == []
    run(x).square().sum().backward()
    torch.testing.assert_close(x.grad, X.sin() * X.cos() * 2)
