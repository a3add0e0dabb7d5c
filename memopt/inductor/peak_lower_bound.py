"""A lower bound of what a partition takes as Inductor's code, known before any code is generated.

Whatever is fused, a library call finds its operands in memory and leaves its results there. Counting those alone, in
the graph's order, says of most cuts that are too large that they are, in a hundredth of the time that lowering takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from memopt.capture.let_go import let_go_of
from memopt.graph.rewrite import storages
from memopt.host.operators import TO_HOST
from memopt.inductor.padding import padded_in_place
from memopt.memory.hand_over import handed_of
from memopt.patterns.overwrites import sum_so_far
from memopt.solve.liveness import profile
from memopt.torch_compat.operators import operator_name

# Never fused into a kernel that Inductor generates, nor done without memory for operands and results.
_CALLS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "wide_product", "add_product"}
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_", "_cudnn_attention_")
# Inductor chooses an order of its own where that takes less.
_REORDERED = 0.97


def peak_lower_bound(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> int:
    """About the least bytes that both graphs take, above what was there before: what library calls read and write.

    Args:
        forward: the forward graph; its placeholders were there before.
        backward: the backward graph, on placeholders that forward made, that were there before, or that are tangents.
        outputs: how many leading outputs of forward the caller gets, and holds.
    """
    return int(_REORDERED * larger_graph(forward, backward, outputs, _peak))


def backward_lower_bound(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> Callable[..., list[int]]:
    """A function of the backward graph's nodes in some order: about the least bytes that each takes with all there is.

    Args:
        forward, backward, outputs: the cut; see `peak_lower_bound`.
    """
    there, held = _ends(forward, outputs)
    handed = handed_of(backward)
    return lambda nodes: _taken(nodes, there, held, handed)


def larger_graph(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    outputs: int,
    peak: Callable[[fx.GraphModule, Collection[int], Mapping[int, int]], int],
) -> int:
    """What the graph that takes more takes, by the `peak` of each.

    Args:
        forward, backward, outputs: the cut; see `peak_lower_bound`.
        peak: of a graph, the storages that were there before and take nothing, and the bytes of those held throughout.
    """
    there, held = _ends(forward, outputs)
    return max(peak(forward, there, {}), peak(backward, there, held))


def _ends(forward: fx.GraphModule, outputs: int) -> tuple[set[int], dict[int, int]]:
    """Storages that take nothing of the device, and bytes of those that the caller holds throughout backward.

    What was there before forward takes nothing, nor does what waits on the host. What the caller lets go of before
    backward is not held.
    """
    sent = forward.graph.find_nodes(op="call_function", target=TO_HOST)
    there = {key for node in (*forward.graph.find_nodes(op="placeholder"), *sent) for key in storages(node)}
    results: Any = forward.graph.output_node().args[0]
    kept = [value for place, value in enumerate(results[:outputs]) if place not in let_go_of(forward)]
    nodes = [value for value in kept if isinstance(value, fx.Node)]
    return there, {key: size for node in nodes for key, size in storages(node).items() if key not in there}


def memory_of(nodes: Iterable[fx.Node], there: Collection[int]) -> dict[fx.Node, dict[int, int]]:
    """The storages of values in Inductor's code, as key → bytes, but for those that were there before.

    Args:
        nodes: in the order of their graph.
        there: keys of those.
    """
    found: dict[fx.Node, dict[int, int]] = {}
    for node in nodes:
        source = padded_in_place(node)
        own = found.get(source) if source is not None else None
        found[node] = {k: size for k, size in storages(node).items() if k not in there} if own is None else own
    return found


def there_at_first(
    nodes: Iterable[fx.Node], own: Mapping[fx.Node, Mapping[int, int]], held: Mapping[int, int]
) -> dict[int, int]:
    """The storages of a graph's placeholders, and what is held, as key → bytes."""
    return dict(held) | {key: size for node in nodes if node.op == "placeholder" for key, size in own[node].items()}


def read_by(node: fx.Node, handed: Collection[fx.Node]) -> list[fx.Node]:
    """What a node reads; the end of a graph reads no results that are handed over before it."""
    return [value for value in node.all_input_nodes if node.op != "output" or value not in handed]


def _peak(module: fx.GraphModule, there: Collection[int], held: Mapping[int, int]) -> int:
    return max(_taken(list(module.graph.nodes), there, held, handed_of(module)))


def _taken(
    nodes: Sequence[fx.Node], there: Collection[int], held: Mapping[int, int], handed: Collection[fx.Node]
) -> list[int]:
    own = memory_of(nodes, there)
    last: dict[int, int] = {}
    for index, node in enumerate(nodes):
        if node in handed:
            last.update(dict.fromkeys(own[node], index))
        for argument in read_by(node, handed):
            last.update(dict.fromkeys(own[argument], index))
    in_memory = set(held)
    for node in nodes:
        if node.op in ("placeholder", "output") or _is_call(node):
            in_memory.update(key for argument in node.all_input_nodes for key in own[argument])
            in_memory.update(own[node])
    dying: dict[int, list[int]] = {}
    for key, index in last.items():
        if key not in held:
            dying.setdefault(index, []).append(key)
    sizes = there_at_first(nodes, own, held)
    born, gone = dict.fromkeys(sizes, 0), dict[int, int]()
    for index, node in enumerate(nodes):
        ends = dying.get(index, ())
        call = node.op == "call_function" and _is_call(node)
        before = sum_so_far(node)
        for key in own[before] if before is not None else () if call else ends:
            if key in born:
                gone.setdefault(key, index)  # a kernel may write over what it reads last
        if node.op == "call_function":
            made = {key: size for key, size in own[node].items() if key in in_memory and key not in born}
            born.update(dict.fromkeys(made, index))
            sizes.update(made)
        for key in ends:
            gone.setdefault(key, index + 1)
    spans = [(first, gone.get(key, len(nodes)), sizes[key]) for key, first in born.items()]
    found: list[int] = profile(len(nodes), spans).tolist()
    return found


def _is_call(node: fx.Node) -> bool:
    name = operator_name(node.target)
    return name in _CALLS or name.startswith(_ATTENTION)
