"""What torch tells of a backward pass while it runs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from memopt.torch_compat.backward import (
    backward_task,
    compiled_node,
    is_users_function,
    keeps_graph,
    leave_missing,
    nodes_so_far,
    running_node,
)


class Double(torch.autograd.Function):
    seen: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Double.seen.append((keeps_graph(), backward_task(), running_node(), gradients))
        return next(gradient for gradient in gradients if gradient is not None) * 2


def test_within_backward_its_task_and_node_are_known() -> None:
    assert keeps_graph() and backward_task() == -1 and running_node() is None
    Double.seen.clear()
    first, _ = Double.apply(torch.ones(3, requires_grad=True))
    first.sum().backward(retain_graph=True)
    first.sum().backward()
    (kept, task, node, _), (kept_again, other, _, _) = Double.seen
    assert kept and not kept_again and task != other and -1 not in (task, other)
    assert node is first.grad_fn and is_users_function(node)


def test_a_missing_gradient_is_none_where_zeros_would_be() -> None:
    Double.seen.clear()
    for leaves in (False, True):
        first, _ = Double.apply(torch.ones(3, requires_grad=True))
        if leaves:
            leave_missing(first.grad_fn)
        first.sum().backward()
    assert [gradients[1] is None for _, _, _, gradients in Double.seen] == [False, True]


def test_the_node_of_a_compiled_call_is_found_behind_what_it_returned() -> None:
    x = torch.ones(3, requires_grad=True)
    compiled = torch.compile(lambda x: x.sin(), backend="aot_eager")
    before = nodes_so_far()
    y = compiled(x) * 2
    node = compiled_node([y], before)
    assert node is not None and node.name() == "CompiledFunctionBackward" and not is_users_function(y.grad_fn)
    assert compiled_node([y], nodes_so_far()) is None and compiled_node([x * 2], before) is None
