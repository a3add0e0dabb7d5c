"""Large values that Inductor would not write over by itself: gradients of logits, in the place of the logits.

A kernel may write its result over what it reads last. Inductor lets it where nothing else is left to read that; what
the same kernel computes beside the result, a loss beside its gradient say, counts as left. Here such readers come
first, in a kernel of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

from torch import fx

from memopt.graph.rewrite import ancestors
from memopt.graph.targets import is_pointwise
from memopt.memory.cost.roofline import result_bytes
from memopt.patterns.column_padding import made_like
from memopt.patterns.write_over import WRITE_OVER
from memopt.program import Program, is_any_view, tensors_of
from memopt.torch_compat.inductor_lowering import (
    is_stored,
    is_to_be_computed,
    lower_by,
    node_being_lowered,
    reads_elsewhere,
    write_into,
)

# What has at least such a part of the bytes of the largest value: the readers' kernel reads it once more.
_PART = 2
_LEAST_BYTES = 2**20  # of what is smaller, one more kernel costs more than the room is worth


def write_over(
    program: Program,
    reads: Mapping[fx.Node, frozenset[fx.Node]],
    calls: Collection[fx.Node],
    fused: Collection[fx.Node],
) -> bool:
    """Edit the program: what kernels make takes the place of large results of library calls that they read last.

    Both live in one graph of the step only, and neither leaves the program. What else reads the earlier value does so
    before: the operator that stands for the later one reads what that makes.

    Args:
        program: is edited.
        reads: per node the stored values that are read where it is.
        calls: the library calls.
        fused: what is not stored.

    Returns:
        Whether there is such a value.
    """
    nodes = list(program.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    least = max(_LEAST_BYTES, max((result_bytes(node) for node in program.calls), default=0) / _PART)
    found: list[tuple[fx.Node, fx.Node, list[fx.Node]]] = []
    stored = [node for node in nodes if node not in fused and not is_any_view(node)]
    for base in nodes:
        if base not in calls or result_bytes(base) < least:
            continue
        others = _others(base, [node for node in stored if place[node] > place[base]], reads)
        last = others[-1] if others else None
        if last is None or not _alike(last, base) or not _is_element_by_element(last, base, reads):
            continue
        if not _in_one_phase(base, others) or not _in_one_phase(last, ()):
            continue
        computed_from = ancestors([last])
        beside = [other for other in others if other not in computed_from]
        if beside:  # else Inductor does it by itself
            found.append((base, last, beside))
    for base, last, beside in found:
        with program.graph.inserting_after(last):
            over = made_like(program, last, WRITE_OVER, (base, last, beside))
        for user in [user for user in last.users if user is not over]:
            user.replace_input_with(last, over)
    if found:
        program.graph_module.recompile()
    return bool(found)


def _others(base: fx.Node, later: list[fx.Node], reads: Mapping[fx.Node, frozenset[fx.Node]]) -> list[fx.Node]:
    """What is stored, or leaves the program, and reads the value itself or something computed from it on the way."""
    return [node for node in later if any(base in reads[operand] for operand in node.all_input_nodes)]


def _alike(last: fx.Node, base: fx.Node) -> bool:
    mine, before = tensors_of(last), tensors_of(base)
    alike = [(value.shape, value.stride(), value.dtype, value.device) for value in (*mine, *before)]
    return last.op == "call_function" and len(mine) == len(before) == 1 and alike[0] == alike[1]


def _is_element_by_element(node: fx.Node, base: fx.Node, reads: Mapping[fx.Node, frozenset[fx.Node]]) -> bool:
    """Whether the node reads of the value, in its own kernel, nothing but the element where it writes its own."""
    if node.target is WRITE_OVER or not is_pointwise(node.target) or node.meta["val"].shape != base.meta["val"].shape:
        return False
    inside = [operand for operand in node.all_input_nodes if operand is not base and base in reads[operand]]
    return all(_is_element_by_element(operand, base, reads) for operand in inside)


def _in_one_phase(node: fx.Node, others: Collection[fx.Node]) -> bool:
    """Whether the value, views looked through, is read in its own phase only, by the others too; no caller gets it."""
    for user in (*node.users, *others):
        if user.op == "output" or user.meta.get("phase") is not node.meta.get("phase"):
            return False
        if is_any_view(user) and not _in_one_phase(user, ()):
            return False
    return True


@functools.cache
def register_write_over() -> None:
    """Tell Inductor of the operator, once in a process."""
    lower_by(WRITE_OVER, _lowered)


def _lowered(base: Any, value: Any, after: Any) -> Any:
    """The value in the place of the other; by itself where this graph reads that otherwise, or is given it."""
    node = node_being_lowered()
    if not _is_read_already(node.all_input_nodes[0], node) or not is_to_be_computed(value):
        return value
    base.realize()
    if not is_stored(base):
        return value
    base.freeze_layout()
    if reads_elsewhere(value, base):
        return value
    write_into(value, base)
    return base


def _is_read_already(base: fx.Node, at: fx.Node) -> bool:
    """Whether everything in the graph that reads the value, views looked through, has been lowered before."""
    for user in base.users:
        if user is at:
            continue
        if at < user or (is_any_view(user) and not _is_read_already(user, at)):
            return False
    return True
