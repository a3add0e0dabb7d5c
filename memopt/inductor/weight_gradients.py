"""Gradients of weights that wait, in torch's own partition, where the most memory is in use when they are computed.

Autograd computes the gradient of the layer that makes logits first of all, while everything that was saved is there,
and torch's partitioner leaves it there unless it finds another order for a reason of its own. Nothing needs it until
the end: after a few layers of backward there is room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from memopt.inductor.kinds import is_library_call
from memopt.inductor.partition import in_order
from memopt.inductor.peak_lower_bound import backward_lower_bound
from memopt.program import is_effectful, is_random

# Library calls by which one waits at most, and how many do.
_FAR, _MOST = 32, 8


def delay_weight_gradients(
    forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, over: Callable[[int], int]
) -> fx.GraphModule:
    """The backward graph with library calls that nothing needs yet later, where that lowers the most bytes in use.

    Args:
        forward: the forward graph; its placeholders were there before.
        backward: the backward graph.
        outputs: how many leading outputs of forward the caller gets, and holds.
        over: bytes by which so many above what was there before forward are too much, or 0.

    Returns:
        Another graph in that order; the same where there is none that takes less.
    """
    taken = backward_lower_bound(forward, backward, outputs)
    nodes = given = list(backward.graph.nodes)
    for _ in range(_MOST):
        live = taken(nodes)
        at = max(range(len(nodes)), key=live.__getitem__)
        fixed = not is_library_call(nodes[at]) or is_effectful(nodes[at]) or is_random(nodes[at])
        if fixed or not over(live[at]):
            break
        better = _put_off(nodes, at, taken, live[at])
        if better is None:
            break
        nodes = better
    return backward if nodes == given else in_order(backward, [node.name for node in nodes])


def _put_off(
    nodes: Sequence[fx.Node], at: int, taken: Callable[[Sequence[fx.Node]], list[int]], most: int
) -> list[fx.Node] | None:
    """The nodes with one of them behind the library call after which least is in use at most; None: at most as much.

    Of several such, behind the one after which least is there. What reads it in between, views say, goes with it.
    """
    group, found, calls = [nodes[at]], None, 0
    best = most, 0
    for place in range(at + 1, len(nodes)):
        node = nodes[place]
        if any(item in group for item in node.all_input_nodes):
            group.append(node)
        if is_effectful(node) or (node in group and is_library_call(node)):
            break
        if not is_library_call(node):
            continue
        calls += 1
        if calls > _FAR:
            break
        rest = [item for item in nodes[at : place + 1] if item not in group]
        order = [*nodes[:at], *rest, *group, *nodes[place + 1 :]]
        live = taken(order)
        takes = max(live), live[at + len(rest)]
        if takes < best:
            found, best = order, takes
    return found
