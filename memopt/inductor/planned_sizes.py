"""A joint graph with symbols cut as a plan says that was made for one size: what it saves, and in which order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import fx

from memopt.capture.joint import Partitioned, is_tangent, split
from memopt.graph.rewrite import descendants
from memopt.inductor.fusion import realize
from memopt.program import Phase, Program, copy_node, module_of
from memopt.torch_compat.min_cut import partition_at
from memopt.torch_compat.symbols import SYMBOLIC


@dataclasses.dataclass(frozen=True)
class SizedPlan:
    """A plan by names of the joint graph's nodes.

    Attributes:
        saved: what forward saves for backward.
        order: the operations of backward, recomputed ones by the names of what they recompute.
        stored: the operations whose results it counts on as stored.
        peak: bytes above what is resident.
    """

    saved: frozenset[str]
    order: tuple[str, ...]
    stored: frozenset[str]
    peak: int

    def is_of(self, joint: fx.GraphModule) -> bool:
        """Whether all that is saved is a value of the joint graph: a plan may save copies of its own."""
        return self.saved <= {node.name for node in joint.graph.nodes}


def plan_of(program: Program, peak: int) -> SizedPlan:
    """The plan of a program that was planned at one size, with its peak in bytes above what is resident."""
    saved: Any = split(program, lambda _, nodes: nodes)
    late = (node for node in program.calls if node.meta.get("phase") is Phase.BACKWARD)
    return SizedPlan(
        frozenset(map(_in_joint, saved)),
        tuple(map(_name, late)),
        frozenset(_name(node) for node in program.calls if node.meta.get("stored")),
        peak,
    )


def _in_joint(node: fx.Node) -> str:
    """The name of a saved value; of a copy that the plan makes of an input, the input's, which backward looks at."""
    return _in_joint(node.args[0]) if "own_copy" in node.meta and isinstance(node.args[0], fx.Node) else node.name


def _name(node: fx.Node) -> str:
    return str(node.meta.get("recomputes", node.name))


def cut_by(plan: SizedPlan, joint: fx.GraphModule, *, num_fwd_outputs: int, **options: Any) -> Partitioned:
    """Both graphs of a joint graph with symbols, as the plan says.

    Args:
        plan: of the same graph at one size.
        joint: as a partitioner receives it.
        num_fwd_outputs: how many leading outputs belong to forward.
        options: what else a partitioner is given.
    """
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    symbols = [node for node in placeholders if isinstance(node.meta.get("val"), SYMBOLIC)]
    symbols += _sizes_of_operators(joint)
    saved = [node for node in joint.graph.nodes if node.name in plan.saved and node not in symbols]
    for node in joint.graph.nodes:
        node.meta.pop("stored", None)
        if node.name in plan.stored:
            node.meta["stored"] = True
    static = [placeholders[index] for index in options.get("static_lifetime_input_indices") or ()]
    forward, backward = partition_at(joint, saved, num_fwd_outputs, static, symbols)
    backward = in_order(backward, plan.order)
    realize(forward)
    realize(backward)
    return forward, backward


def _sizes_of_operators(joint: fx.GraphModule) -> list[fx.Node]:
    """Sizes that operators of forward return beside tensors, as fused attention does on CUDA.

    A plan at one size has numbers in their place, and backward cannot compute them of what it says is saved.
    """
    late = descendants(node for node in joint.graph.nodes if is_tangent(node))
    return [
        node
        for node in joint.graph.nodes
        if node.op == "call_function"
        and node not in late
        and isinstance(node.meta.get("val"), SYMBOLIC)
        and not all(isinstance(read.meta.get("val"), SYMBOLIC) for read in node.all_input_nodes)
    ]


def in_order(module: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """A copy of a graph with its operations in the order of these names, each after what it reads.

    What is not named comes where it is read first.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    by_name = {node.name: node for node in nodes if node.op == "call_function"}
    given = [node for node in nodes if node.op != "call_function"]
    named = [by_name[name] for name in dict.fromkeys(names) if name in by_name]
    for wanted in (*given, *named, *nodes):
        waiting = [wanted]
        while waiting:
            node = waiting[-1]
            missing = [read for read in node.all_input_nodes if read not in copies]
            if node not in copies and missing:
                waiting += missing
                continue
            waiting.pop()
            if node not in copies:
                copies[node] = copy_node(graph, node, copies.__getitem__)
    copy_node(graph, module.graph.output_node(), copies.__getitem__)
    return module_of(module, graph)
