from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from memopt.torch_compat.aot_autograd import aot_autograd
from memopt.torch_compat.autograd_nodes import (
    at_end_of_backward,
    compiled_nodes,
    gradients_are_held,
    order_of,
    when_released,
    when_run,
)
from memopt.torch_compat.boxed import boxed


def test_what_is_to_be_called_at_the_end_comes_behind_all_hooks() -> None:
    said: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: at_end_of_backward(lambda: said.append("end")))
    x.register_post_accumulate_grad_hook(lambda _: said.append("accumulated"))
    y.sum().backward()
    assert said == ["accumulated", "end"]


def test_where_no_backward_runs_there_is_no_end() -> None:
    with pytest.raises(RuntimeError):
        at_end_of_backward(lambda: None)


def test_later_nodes_have_larger_numbers() -> None:
    x = torch.ones(2, requires_grad=True)
    first = x * 2
    second = first + 1
    assert order_of(first.grad_fn) < order_of(second.grad_fn)


def test_nodes_of_compiled_graphs_and_those_that_lie_behind_them() -> None:
    double = torch.compile(lambda x: (x * 2).sin(), backend="aot_eager")
    first = double(torch.ones(2, requires_grad=True))
    second = double(first)
    outputs = {"loss": second.sum(), "others": [second + 1, torch.zeros(2)]}
    nodes = [first.grad_fn, second.grad_fn]
    assert set(compiled_nodes(outputs)) == set(nodes)
    assert compiled_nodes(outputs, behind=False) == nodes[1:]
    assert compiled_nodes(first * 2) == nodes[:1] and compiled_nodes(torch.ones(2, requires_grad=True) * 2) == []


def _compiled(freed: list[bool]) -> Any:
    """A layer whose compiled backward notes whether the gradient that it begins with goes as it lets go of it."""

    def forward(module: Any, inputs: Any) -> Any:
        return boxed(lambda values: module(*values))

    def backward(module: Any, inputs: Any) -> Any:
        def run(values: list[Any]) -> Any:
            results = module(*values)
            gradient = values[-1].untyped_storage()._weak_ref()
            values.clear()
            freed.append(torch.UntypedStorage._expired(gradient))
            return results

        return boxed(run)

    torch._dynamo.reset()
    return torch.compile(lambda x: x.sin(), backend=aot_autograd(fw_compiler=forward, bw_compiler=backward))


def test_who_is_called_when_a_node_has_run_holds_no_gradient_meanwhile() -> None:
    freed, said = list[bool](), list[str]()
    y = _compiled(freed)(torch.ones(2, requires_grad=True))
    node = weakref.ref(y.grad_fn)
    when_released(y.grad_fn, lambda: said.append("released"))
    when_run(y.grad_fn, lambda: said.append("run"))
    when_run(y.grad_fn, lambda: said.append(f"run, {len(freed)}"))
    loss = y.square().sum()
    loss.backward(retain_graph=True)
    assert said == ["run", "run, 1"]
    loss.backward()
    assert said[2:] == ["released", "run", "run, 2"]
    assert freed == [not gradients_are_held()] * 2
    del loss, y
    assert node() is None


def test_nodes_of_eager_operators_say_so_too() -> None:
    said: list[str] = []
    y = torch.ones(2, requires_grad=True).sin()
    when_released(y.grad_fn, lambda: said.append("released"))
    y.sum().backward()
    assert said == ["released"]
