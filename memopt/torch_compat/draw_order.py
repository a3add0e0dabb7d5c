"""Random numbers in the order in which a graph draws them, in the code that Inductor makes of it.

Its scheduler sorts calls by what they read alone, and calls that draw read nothing of each other: one whose numbers
nothing reads, or that is read late, comes after others. In torch 2.11 a pass moves such calls as well, and `rrelu`
draws for values that eager draws nothing for. Where Inductor draws as eager does (`fallback_random`, and what it has no
kernel of its own for) all numbers would be others.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp.decompositions_for_rng import extra_random_decomps
from torch._inductor.decomposition import decompositions
from torch._inductor.fx_passes import post_grad
from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import V

from memopt.torch_compat.operators import OpOverload


@functools.cache
def keep_draw_order(draws: Callable[[fx.Node], bool]) -> None:
    """Keep that order from now on in this process; tried on torch 2.11 and 2.13.

    Args:
        draws: whether a node of a graph draws random numbers.
    """
    _keep_when_moved(draws)
    rrelu: Any = torch.ops.aten.rrelu_with_noise_functional.default
    if rrelu not in extra_random_decomps and rrelu in decompositions:  # as it is in torch 2.13
        extra_random_decomps[rrelu] = decompositions.pop(rrelu)
    kind: Any = Scheduler
    plain = getattr(kind, "compute_dependencies", None)
    if plain is None:
        return

    @functools.wraps(plain)
    def compute_dependencies(self: Any) -> Any:
        drawing = [node for node in self.nodes if _calls(node, draws) and node.get_outputs()]
        for first, second in itertools.pairwise(drawing):
            V.graph.additional_buffer_deps[second.get_name()].add(first.get_outputs()[0].get_name())
        return plain(self)

    kind.compute_dependencies = compute_dependencies


def _keep_when_moved(draws: Callable[[fx.Node], bool]) -> None:
    """After Inductor's pass that moves calls to where they are read, have those that draw in their order again."""
    plain: Any = getattr(post_grad, "reorder_for_locality", None)
    if plain is None or "nondeterministic_seeded" in _names(plain.__code__):
        return

    @functools.wraps(plain)
    def reorder_for_locality(graph: fx.Graph) -> None:
        drawing = list(filter(draws, graph.nodes))
        plain(graph)
        if drawing != list(filter(draws, graph.nodes)):
            _put_in_order(graph, drawing)

    post_grad.reorder_for_locality = reorder_for_locality


def _put_in_order(graph: fx.Graph, drawing: Sequence[fx.Node]) -> None:
    """Put each of these nodes after the one before it, and what reads it after that; all else stays in its order."""
    nodes = list(graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    readers = {node: [place[user] for user in node.users] for node in nodes}
    waits = [len(node.all_input_nodes) for node in nodes]
    for first, second in itertools.pairwise(drawing):
        readers[first].append(place[second])
        waits[place[second]] += 1
    ready = [index for index, count in enumerate(waits) if not count]  # sorted, so it is a heap
    last = None
    while ready:
        node = nodes[heapq.heappop(ready)]
        if last is not None:
            last.append(node)
        last = node
        for reader in readers[node]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, reader)


def _names(code: types.CodeType) -> set[str]:
    """The names that a function's code and that of functions within it reads."""
    within = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names, within))


def _calls(node: Any, draws: Callable[[fx.Node], bool]) -> bool:
    """Whether a scheduler's node calls an operator that draws."""
    made = node.node
    return isinstance(getattr(made, "op_overload", None), OpOverload) and any(map(draws, made.origins))
