"""What torch's partition saves though kernels can recompute it of what else is saved, where a little room is missing.

Torch's partitioner saves an operand of a matrix product in backward even where one kernel computes it of other saved
values, since it would be written to memory again. Recomputed in the layers that backward comes to last, it is there
when there is room for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import fx

from memopt.capture.joint import Partitioned, drop_outputs
from memopt.graph.rewrite import storages
from memopt.inductor.kinds import DRAWING, SEED, is_inlined
from memopt.inductor.partition import in_order
from memopt.program import copy_node, is_any_view, is_effectful, is_random, module_of

# A value is recomputed of at most so many times its own bytes, by at most so many operations.
_READ, _OPERATIONS = 3, 32
# What is smaller, in bytes, is not worth an operation.
_LEAST = 2**16


def rematerialize_saved(
    forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, wanted: int, mutated: Collection[str] = ()
) -> Partitioned | None:
    """Both graphs with saved values of at least so many bytes recomputed in backward.

    Those that forward makes first are taken first: backward reads them last.

    Args:
        forward: the forward graph.
        backward: the backward graph; what it reads of forward goes by the same name.
        outputs: how many leading outputs of forward the caller gets.
        wanted: bytes to save less.
        mutated: names of inputs that the step writes to: in backward they are not what they were.

    Returns:
        New graphs; None where there is not so much that could be recomputed.
    """
    results: Sequence[Any] = forward.graph.output_node().args[0]  # type: ignore[assignment]
    place = {node: index for index, node in enumerate(forward.graph.nodes)}
    inputs = forward.graph.find_nodes(op="placeholder")
    names = {node.name for node in backward.graph.find_nodes(op="placeholder")}
    kept = [node for node in results[outputs:] if isinstance(node, fx.Node)]
    saved = [node for node in kept if node.op == "call_function" and node.name in names]
    stay = {*saved, *(node for node in inputs if node.name in names and node.name not in mutated)}
    caller = [node for node in results[:outputs] if isinstance(node, fx.Node)]
    holders = Counter(key for node in (*inputs, *caller, *saved) for key in storages(node))
    found: dict[fx.Node, list[fx.Node]] = {}
    leaves: set[fx.Node] = set()  # what is recomputed of; it stays saved
    for node in sorted(set(saved), key=place.__getitem__):
        if wanted <= 0:
            break
        size = sum(size for key, size in storages(node).items() if holders[key] == 1)  # there for this value alone
        if size < _LEAST or node in leaves:
            continue
        stay.discard(node)
        chain = _chain(node, stay, _READ * size)
        if chain is None:
            stay.add(node)
            continue
        found[node], wanted = sorted(chain, key=place.__getitem__), wanted - size
        leaves.update(item for part in chain for item in part.all_input_nodes if item in stay)
    if wanted > 0 or not found:
        return None
    return _without(forward, outputs, found), _with(backward, found)


def _chain(node: fx.Node, stay: set[fx.Node], most: int) -> set[fx.Node] | None:
    """The operations that compute the node of what stays; None where these are no part of one kernel.

    Args:
        node: a saved value.
        stay: what backward reads anyway.
        most: bytes that may be read for it.
    """
    chain: set[fx.Node] = set()
    read: dict[int, int] = {}
    waiting = [node]
    while waiting:
        item = waiting.pop()
        if item in stay:
            read.update(storages(item))
        elif item.op == "call_function" and _is_light(item):
            chain.add(item)
            waiting.extend(operand for operand in item.all_input_nodes if operand not in chain)
        else:
            return None
        if len(chain) > _OPERATIONS or sum(read.values()) > most:
            return None
    return chain


def _is_light(node: fx.Node) -> bool:
    drawn = node.target in (DRAWING, SEED) or is_random(node)  # saved once is drawn once
    return (is_inlined(node) or is_any_view(node)) and not drawn and not is_effectful(node)


def _without(forward: fx.GraphModule, outputs: int, dropped: Collection[fx.Node]) -> fx.GraphModule:
    """A copy of forward that does not return these for backward."""
    names = {node.name for node in dropped}
    copied = in_order(forward, ())
    results: Sequence[Any] = copied.graph.output_node().args[0]  # type: ignore[assignment]
    for index in reversed(range(outputs, len(results))):
        if isinstance(results[index], fx.Node) and results[index].name in names:
            drop_outputs(copied, index, index + 1)
    copied.graph.eliminate_dead_code()
    return copied


def _with(backward: fx.GraphModule, again: Mapping[fx.Node, Sequence[fx.Node]]) -> fx.GraphModule:
    """A copy of backward that computes these itself, each before it is first read."""
    chains = {node.name: chain for node, chain in again.items()}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    made: dict[str, fx.Node] = {}  # by the name in forward

    def resolve(node: fx.Node) -> fx.Node:
        if node not in copies:  # one of these
            for part in chains[node.name]:
                if part.name not in made:
                    made[part.name] = copy_node(graph, part, lambda item: made[item.name])
            copies[node] = made[node.name]
        return copies[node]

    for node in backward.graph.nodes:
        if node.op == "placeholder" and node.name in chains:
            continue
        copies[node] = copy_node(graph, node, resolve)
        if node.op == "placeholder":
            made[node.name] = copies[node]
    return module_of(backward, graph)
