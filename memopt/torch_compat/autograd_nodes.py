"""Nodes of autograd's graph that compiled code made, and when what they save is released."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memopt.torch_compat.backward import COMPILED_NODE, keeps_graph
from memopt.torch_compat.gradients_let_go import call_when_run, can_let_go, lets_gradients_go

_RUN = "apply_boxed"  # what autograd calls to run a node, in torch 2.13


def compiled_nodes(outputs: Any, most: int = 10_000, *, behind: bool = True) -> list[Any]:
    """The nodes that compiled graphs made, behind these tensors; weak references to them live as long as the graph.

    Args:
        outputs: tensors in any nesting.
        most: nodes that are looked at; what lies behind them is not found.
        behind: whether those are wanted that lie behind others of them, too; else parameters are not looked at either.
    """
    found: list[Any] = []
    waiting = [leaf.grad_fn for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    seen: set[Any] = set()
    while waiting and len(seen) < most:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == COMPILED_NODE:  # `name` makes the text anew each time
            found.append(node)
            if not behind:
                continue
        waiting += [following for following, _ in node.next_functions]
    return found


def gradients_are_held() -> bool:
    """Whether autograd holds the gradients that compiled backward begins with until it has returned.

    Torch 2.13 hands them over in a list (`boxed_grads_call`), and before it `let_gradients_go` has them go. Those of
    outputs that no loss has used are zeros as large as these. Tried on 2.11 and 2.13.
    """
    return not hasattr(torch.autograd.Function, "boxed_grads_call") and not can_let_go()


def first_nodes(outputs: Any) -> list[Any]:
    """The nodes from which a backward of these tensors begins, each once."""
    leaves = (leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
    return list(dict.fromkeys(leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None))


def when_released(node: Any, call: Callable[[], None]) -> None:
    """Call `call` when backward has run through the node and has not kept the graph (`retain_graph`)."""

    def ran() -> None:
        if not keeps_graph():
            call()

    when_run(node, ran)


def when_run(node: Any, call: Callable[[], None]) -> None:
    """Call `call` whenever backward has run through the node.

    A hook of the node itself would have autograd hold the gradients that a compiled backward begins with until that has
    returned: it keeps a copy of what the node is given for its hooks. So the method that autograd calls is wrapped,
    where there is one that may let go of them (`boxed_grads_call`). Tried on torch 2.11 and 2.13.
    """
    if type(node).__name__ == COMPILED_NODE and lets_gradients_go():
        call_when_run(node, call)
        return
    run = vars(node).get(_RUN, getattr(type(node), _RUN, None)) if type(node).__name__ == COMPILED_NODE else None
    if run is None or gradients_are_held():
        node.register_hook(lambda *_: call())
        return
    weak, wrapped = weakref.ref(node), _RUN in vars(node)

    def apply(gradients: list[Any]) -> Any:
        found = run(gradients) if wrapped else run(weak(), gradients)
        call()
        return found

    setattr(node, _RUN, apply)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have this called as the backward pass that runs in this thread ends; tried on 2.11 and 2.13.

    Raises:
        RuntimeError: none runs.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def order_of(node: Any) -> int:
    """When a node of autograd's graph was made, in this thread: later ones have larger numbers; 2.11 and 2.13."""
    return int(node._sequence_nr())
