from __future__ import annotations

import pytest
import torch

from memopt.torch_compat.autograd_nodes import at_end_of_backward, compiled_nodes, order_of


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
