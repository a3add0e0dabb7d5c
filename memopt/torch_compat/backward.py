"""What torch tells of a backward pass: the graph task that runs, the nodes that a call of compiled code has made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors as roles

COMPILED_NODE = "CompiledFunctionBackward"  # AOTAutograd's name, in torch 2.11 and 2.13


def keeps_graph() -> bool:
    """Whether the backward pass that runs was asked to keep the graph for another one; tried on 2.11 and 2.13.

    True where none runs: whoever calls the code by hand may call it again.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def backward_task() -> int:
    """Which backward pass runs in this thread, as a number of its own; -1 where none does; tried on 2.11 and 2.13."""
    return int(torch._C._current_graph_task_id())


def running_node() -> Any:
    """The autograd node that the backward pass runs now; None where there is none; tried on 2.13."""
    return torch._C._current_autograd_node()


def leave_missing(node: Any) -> None:
    """Have the backward of a node's function get None for a gradient that there is not, where autograd makes zeros.

    If memory runs out as autograd makes them, those it has made so far are never freed. To be called before the node
    runs, by a hook of it as well; tried on 2.11 and 2.13.
    """
    node.set_materialize_grads(False)


def nodes_so_far() -> int:
    """How many autograd nodes this thread has made; a later node's number is not less; tried on 2.13."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def compiled_node(values: Iterable[Any], first: int) -> Any:
    """The autograd node of AOTAutograd's function behind these values; None where no call since `first` made one.

    Args:
        values: what the call returned, or wrote to; tensors among them.
        first: `nodes_so_far` before the call.
    """
    work = [value.grad_fn for value in values if isinstance(value, torch.Tensor) and value.grad_fn is not None]
    seen = set(work)
    while work:
        node = work.pop()
        name = node.name()
        if name.endswith("AccumulateGrad") or node._sequence_nr() < first:
            continue
        if name == COMPILED_NODE:
            return node
        fresh = {item for item, _ in node.next_functions if item is not None} - seen
        seen |= fresh
        work.extend(fresh)
    return None


def tangent_places(tangents: Mapping[str, Any], outputs: Iterable[Any]) -> dict[str, int | None]:
    """Which output of AOTAutograd's forward each tangent is of, by the tangent's name; None where that is not known.

    Args:
        tangents: by name, the roles that AOTAutograd gave them (`meta["desc"]`).
        outputs: the roles of forward's outputs, in order.
    """
    places = {desc: index for index, desc in enumerate(outputs) if desc is not None}
    return {
        name: places.get(desc.output) if isinstance(desc, roles.TangentAOTInput) else None
        for name, desc in tangents.items()
    }


def shown_by_role(role: Any) -> tuple[str, int] | None:
    """What an output of AOTAutograd's graph shows: ("output", position) or ("input", position), of the graph before it.

    None where it is another thing. Tried on 2.13.
    """
    if isinstance(role, roles.IntermediateBaseAOTOutput):
        return shown_by_role(role.base_of)
    if isinstance(role, roles.PlainAOTOutput):
        return "output", role.idx
    if isinstance(role, roles.InputMutationAOTOutput) and isinstance(role.mutated_input, roles.PlainAOTInput):
        return "input", role.mutated_input.idx
    return None


def input_of_gradient(role: Any) -> int:
    """The position of the input whose gradient an output of AOTAutograd's graph is; -1 where it is none of one."""
    of = role.grad_of if isinstance(role, roles.GradAOTOutput) else None
    return int(of.idx) if isinstance(of, roles.PlainAOTInput) else -1


def is_users_function(node: Any) -> bool:
    """Whether an autograd node is of a `torch.autograd.Function`."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def role_of(node: fx.Node) -> Any:
    """What AOTAutograd says that an input of its graph, or a list of outputs, is; None where it says nothing."""
    return node.meta.get("desc")
