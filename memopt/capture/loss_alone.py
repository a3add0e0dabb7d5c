"""Steps planned for the gradients of a loss alone, where no plan keeps the budget with those of all outputs.

Models of libraries return logits and caches beside their loss, whose gradients nobody asks for: AOTAutograd's backward
begins with zeros for them all the same, as large as they are. Without them a step takes less, and may keep a budget
that is refused else. What has no gradient so still requires one, as in eager: a backward that reaches it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from memopt.capture.dynamo_graph import value_of
from memopt.torch_compat.not_returned import NotReturned


def others_than_the_loss(graph_module: fx.GraphModule) -> tuple[int, ...] | None:
    """Positions of a graph's outputs that have gradients beside its loss; None where it has no loss, or several.

    A loss is the one output of a single number that requires a gradient.
    """
    returned = _returned(graph_module)
    trained = [place for place, node in enumerate(returned) if _requires_gradient(node)]
    losses = {returned[place] for place in trained if _value(returned[place]).numel() == 1}
    if len(losses) != 1:
        return None
    return tuple(place for place in trained if returned[place] not in losses)


def detach_outputs(graph_module: fx.GraphModule, places: Sequence[int]) -> None:
    """Have a graph of Dynamo's return what is at these positions without gradients."""
    graph, output = graph_module.graph, graph_module.graph.output_node()
    returned, detached = list(_returned(graph_module)), dict[fx.Node, fx.Node]()
    for place in places:
        node = returned[place]
        if node not in detached:
            with graph.inserting_before(output):
                detached[node] = graph.call_method("detach", (node,))
            detached[node].meta.update(node.meta, example_value=_value(node).detach())
        returned[place] = detached[node]
    output.args = (tuple(returned),)
    graph_module.recompile()


def drop_outputs(graph_module: fx.GraphModule, stand: type[NotReturned] = NotReturned) -> list[torch.Tensor | None]:
    """Have a graph of Dynamo's return its loss alone of the tensors that it makes, for who takes nothing else.

    Args:
        graph_module: the graph.
        stand: what stands for the others.

    Returns:
        What stands for each output: None where it is returned as before.
    """
    output = graph_module.graph.output_node()
    stands: list[torch.Tensor | None] = []
    for node in _returned(graph_module):
        value = value_of(node) if isinstance(node, fx.Node) and node.op != "placeholder" else None
        large = isinstance(value, torch.Tensor) and value.numel() != 1
        stands.append(stand.like(cast("torch.Tensor", value)) if large else None)
    kept = [node for node, stand in zip(_returned(graph_module), stands, strict=True) if stand is None]
    output.args = (tuple(kept),)
    graph_module.recompile()  # what is dead by now AOTAutograd finds, which knows what writes
    return stands


def in_place_of_dropped(run: Callable[..., Any], stands: Sequence[torch.Tensor | None]) -> Callable[..., Any]:
    """A compiled graph that `drop_outputs` has edited, whose outputs stand where they did.

    Args:
        run: returns those that are left.
        stands: as returned by that.
    """

    def call(*args: Any) -> Any:
        left = iter(run(*args))
        return [next(left) if stand is None else stand for stand in stands]

    return call


def attached(run: Callable[..., Any], places: Sequence[int], needed: str) -> Callable[..., Any]:
    """A compiled graph that `detach_outputs` has edited, whose outputs require gradients as before.

    Args:
        run: returns the outputs.
        places: of those that were detached.
        needed: the budget that gradients of all outputs need, in words.
    """

    def call(*args: Any) -> Any:
        results = run(*args)
        if not torch.is_grad_enabled():
            return results
        found, values = list(results), {id(results[place]): results[place] for place in places}
        names = [next(f"output {place}" for place in places if id(results[place]) == key) for key in values]
        anchor = torch.empty(0, requires_grad=True)
        refuse: Any = _Refusal.apply
        new = dict(zip(values, refuse(anchor, names, needed, *values.values()), strict=True))
        for place in places:
            found[place] = new[id(results[place])]
        return type(results)(found)

    return call


class _Refusal(torch.autograd.Function):
    """Passes values on; a gradient of one is refused."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        names: list[str],
        needed: str,
        *values: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.names, ctx.needed = names, needed
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        name = next(name for name, gradient in zip(ctx.names, gradients, strict=True) if gradient is not None)
        raise RuntimeError(
            f"within its budget memopt has planned this step for gradients of the loss alone, and {name} of the "
            f"model's graph has one, too: that takes a budget of {ctx.needed}, or detach() it"
        )


def _returned(graph_module: fx.GraphModule) -> Sequence[Any]:
    returned: Any = graph_module.graph.output_node().args[0]
    return returned if isinstance(returned, (tuple, list)) else ()


def _value(node: fx.Node) -> torch.Tensor:
    value: torch.Tensor = value_of(node)
    return value


def _requires_gradient(node: Any) -> bool:
    value = value_of(node) if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.requires_grad and node.op != "placeholder"
