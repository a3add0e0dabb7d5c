"""Saved values that wait in the host's memory between forward and backward, in both graphs of a planned step.

Both graphs are in the plan's order. Of what forward makes for backward, large values leave as soon as they are made and
come back just in time; which ones, and where, is `memopt.solve.offload`'s to say. The plan does not know of it: its
code takes less than it says, and so it is made for more room, as wherever code takes less.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from memopt.capture.joint import Partitioned
from memopt.cuda_graphs.reserve import may_wait
from memopt.graph.propagation import fake_mode
from memopt.graph.rewrite import storages
from memopt.host.available import available_bytes
from memopt.host.operators import ARRIVED, FETCH, LANDED, TO_HOST
from memopt.inductor.host_copies import register_host_copies
from memopt.inductor.kinds import is_library_call
from memopt.inductor.peak_estimate import expected_bytes
from memopt.memory.cost.roofline import span
from memopt.passes.offload import Offload
from memopt.program import copy_node, module_of
from memopt.solve.offload import Offload as Problem
from memopt.solve.offload import Trip, Value, trips

if TYPE_CHECKING:
    from memopt.compilation.session import Session

# What lowers the peak by less than peak / _WORTH is not worth a copy.
_WORTH = 100
# Where that is lower by this share of what is sent, and more room is of use, every value is worth its copy.
_USEFUL = 0.9
# Of values that lower it by no more than that / _HARDLY, fewer are sent.
_HARDLY = 50
# Where nothing is recomputed, only as many are sent as the budget asks for: code takes up to so much more.
_SPARE = 20


def wait_on_host(session: Session, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> Partitioned:
    """Both graphs with some of what is saved copied to the host and back; the same ones where nothing is won by it.

    Args:
        session: whose step it is: its budget, its passes, and what its operations take.
        forward: the forward graph.
        backward: the backward graph; what it reads of forward goes by the same name.
        outputs: how many leading outputs of forward the caller gets.
    """
    allowed = next((item for item in session.rewriting.passes if isinstance(item, Offload)), None)
    if allowed is None or not session.limit_bytes or not session.one_graph or session.step is None:
        return forward, backward
    if any(may_wait(item.costs.values()) for item in session.step.planned):
        return forward, backward  # its host has no time for more calls
    whole = expected_bytes(forward, backward, outputs)
    if not session.recomputes and not session.excess_with(whole):
        return forward, backward
    device = session.resident.device
    link = session.table.link(device)
    if not all(link):
        return forward, backward
    found = candidates(forward, backward, outputs, allowed.least_bytes)
    seconds = _seconds(session)
    problem = problem_of(forward, backward, found, seconds, link, int(allowed.share * available_bytes()))
    ways = trips(problem)

    def taken(number: int) -> int:
        return expected_bytes(*sent(forward, backward, outputs, found, problem, ways[:number]), outputs)

    if not ways:
        return forward, backward
    best = taken(len(ways))
    if whole - best < whole // _WORTH:
        return forward, backward
    if session.recomputes and whole - best >= _USEFUL * sum(problem.values[way.value].size for way in ways):
        return sent(forward, backward, outputs, found, problem, ways)
    enough = best + (whole - best) // _HARDLY
    if not session.recomputes:  # the budget less what is over: what the code of as many bytes may take
        enough = max(enough, whole - session.excess_with(whole) - whole // _SPARE)
    low, high = 1, len(ways)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if taken(middle) <= enough else (middle + 1, high)
    return sent(forward, backward, outputs, found, problem, ways[:low])


def waiting(forward: fx.GraphModule) -> list[int]:
    """The bytes of each value that a forward graph sends to the host."""
    nodes = forward.graph.find_nodes(op="call_function", target=TO_HOST)
    return [sum(storages(node).values()) for node in nodes]


def candidates(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, least: int) -> list[fx.Node]:
    """What forward makes for backward alone and nothing else may write to: each by itself, and large enough.

    Args:
        forward, backward, outputs: the two graphs of the step.
        least: the fewest bytes of one.
    """
    results: Any = forward.graph.output_node().args[0]
    saved = [node for node in results[outputs:] if isinstance(node, fx.Node)]
    names = {node.name for node in backward.graph.find_nodes(op="placeholder")}
    others = [*forward.graph.find_nodes(op="placeholder"), *forward.graph.find_nodes(op="get_attr")]
    others += [node for node in results[:outputs] if isinstance(node, fx.Node)]
    held = {key for node in others for key in storages(node)}
    count: dict[int, int] = {}
    for node in saved:
        for key in storages(node):
            count[key] = count.get(key, 0) + 1
    return [
        node
        for node in saved
        if node.op == "call_function" and node.name in names and _is_whole(node, least)
        if all(key not in held and count[key] == 1 for key in storages(node))
    ]


def _is_whole(node: fx.Node, least: int) -> bool:
    """Whether the node's value is a tensor of fixed size that fills a storage of its own of so many bytes."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        return False
    size = span(value) * value.element_size()
    return least <= size == value.untyped_storage().nbytes() == value.nbytes


def problem_of(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    found: Sequence[fx.Node],
    seconds: Mapping[str, float],
    link: tuple[float, float],
    limit: int,
) -> Problem:
    """What may travel, in plain numbers.

    Args:
        forward, backward: the two graphs of the step.
        found: what forward makes that may wait.
        seconds: what operations take, by the name that they have in forward and, recomputed, there.
        link: bytes per second to the host, and from it.
        limit: the most bytes that may wait.
    """
    first, second = list(forward.graph.nodes), list(backward.graph.nodes)
    place = {node: index for index, node in enumerate(first)}
    later = {node: index for index, node in enumerate(second)}
    reads: dict[int, int] = {}  # by storage: where it is read last, views included
    for node, index in place.items():
        if node.op == "call_function":
            touched = (key for item in (node, *node.all_input_nodes) for key in storages(item))
            reads.update(dict.fromkeys(touched, index))
    readers = {node.name: node.users for node in backward.graph.find_nodes(op="placeholder")}
    leaving, coming = _places(first), _places(second)
    values = []
    for node in found:
        needed = min((later[user] for user in readers[node.name]), default=len(second) - 1)
        at = bisect.bisect_right(coming, needed) - 1
        (key,) = storages(node)
        values.append(Value(node.meta["val"].nbytes, place[node], reads[key], coming[at] if at >= 0 else 0))
    times = [[_time(node, seconds) for node in nodes] for nodes in (first, second)]
    return Problem(times[0], times[1], leaving, coming, *link, values, limit)


def _places(nodes: Sequence[fx.Node]) -> list[int]:
    """Where a call parts no kernels from one another: before library calls, which they are not fused across."""
    return [index for index, node in enumerate(nodes) if is_library_call(node)]


def _time(node: fx.Node, seconds: Mapping[str, float]) -> float:
    known = seconds.get(node.name)
    return seconds.get(node.meta.get("recomputes", ""), 0.0) if known is None else known


def _seconds(session: Session) -> dict[str, float]:
    planned = session.step.planned if session.step is not None else ()
    return {name: cost.seconds for item in planned for name, cost in item.costs.items()}


def sent(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    outputs: int,
    found: Sequence[fx.Node],
    problem: Problem,
    ways: Collection[Trip],
) -> Partitioned:
    """Copies of both graphs in which values go these ways.

    Args:
        forward, backward, outputs: the two graphs of the step.
        found: the values of the problem.
        problem: where they have to be back.
        ways: which of them travel, and where; at least one.
    """
    register_host_copies()
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    held: dict[fx.Node, fx.Node] = {}
    with fake_mode(forward), torch.no_grad():
        for index, node in enumerate(forward.graph.nodes):
            for way in ways:
                value = found[way.value]
                if way.landed == index:
                    held[value] = _call(graph, value, "held", LANDED, copies[value], held[value])
                if way.leaves == index:
                    held[value] = _call(graph, value, "sent", TO_HOST, copies[value])
            copies[node] = copy_node(graph, node, copies.__getitem__)
        end = copies[forward.graph.output_node()]
        results: Any = forward.graph.output_node().args[0]
        saved = [held.get(node) or copies[node] if isinstance(node, fx.Node) else node for node in results[outputs:]]
        mine = [copies[node] if isinstance(node, fx.Node) else node for node in results[:outputs]]
        end.args = ((*mine, *saved),)
        ends = {found[way.value].name: (held[found[way.value]], way, problem.values[way.value].needed) for way in ways}
        return module_of(forward, graph), _returning(backward, ends)


def _returning(backward: fx.GraphModule, ends: Mapping[str, tuple[fx.Node, Trip, int]]) -> fx.GraphModule:
    """A copy of backward that takes what waits on the host, and copies it back.

    Args:
        backward: the backward graph.
        ends: by name what of forward stands for a value now, its way, and the place where it has to be back.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs = [node for node in backward.graph.find_nodes(op="placeholder") if node.name in ends]
    given = {node: ends[node.name] for node in sorted(inputs, key=lambda node: ends[node.name][2])}
    coming: dict[fx.Node, fx.Node] = {}
    waits: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(backward.graph.nodes):
        for before, (_, way, needed) in given.items():
            if way.returns == index:
                device = before.meta["val"].device
                coming[before] = _call(graph, before, "fetched", FETCH, waits[before], device)
            if needed == index:
                copies[before] = _call(graph, before, "back", ARRIVED, coming[before], waits[before])
        if node in given:
            there = given[node][0]
            waits[node] = graph.placeholder(there.name)
            waits[node].meta = {**node.meta, "val": there.meta["val"]}
        else:
            copies[node] = copy_node(graph, node, copies.__getitem__)
    return module_of(backward, graph)


def _call(graph: fx.Graph, like: fx.Node, what: str, target: Any, *args: Any) -> fx.Node:
    """Append a call to a graph, with its value; it is named after another node."""
    node = graph.create_node("call_function", target, args, name=f"{like.name}_{what}")
    node.meta = {key: value for key, value in like.meta.items() if key in ("stack_trace", "phase")}
    node.meta["val"] = target(*fx.map_arg(args, lambda item: item.meta["val"]))
    return node
