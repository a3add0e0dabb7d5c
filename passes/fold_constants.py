"""FoldConstants: compute ahead of time what is the same in every call."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar

import torch
from torch import fx

from memopt.graph.rewrite import (
    ALLOWANCE,
    add_constant,
    ancestors,
    drop_unused_constants,
    erase_unused,
    forget_inplace,
    returned_storages,
    storages,
)
from memopt.pass_manager import Change, Pass, PassResult, Refusal
from memopt.program import (
    InputKind,
    Phase,
    Program,
    describe,
    is_effectful,
    is_random,
    tensors_of,
)
from memopt.torch_compat.dispatch import no_modes
from memopt.torch_compat.fake_tensors import FakeTensor
from memopt.torch_compat.storages import storage_id

WORKSPACE = 256 * 1024 * 1024
"""Bytes that the values computed here may take together, while one group of constants is folded."""


class FoldConstants(Pass):
    """Replace what depends on constants alone by CONSTANT inputs that hold the results.

    Algebra: f(c) is one value for one c. It is computed here, once, by the same operator in the same dtype on the same
    device, so its bits are those that every call would have computed.

    Cases:
        1. Operations on CONSTANT inputs are folded with those inputs, which go away when nothing else reads them.
        2. In an inference program PARAMETER and BUFFER inputs count as constant too. Those that a result was computed
           from are added to `baked`.
        3. Operations without tensor operands (full, arange, scalar_tensor) count as constant.
        4. Views at the end of a folded chain stay in the graph and view the folded tensor: they cost nothing, and what
           they share stays shared. A view of a parameter alone is therefore never folded.

    Memory: a folded result is held for good. A group of results is folded when they take no more bytes than the
    CONSTANT inputs that they make dead, plus an allowance of 64 KiB for the whole program. Parameters and buffers stay
    with the model, so nothing is gained by reading them for the last time.

    Refusals:
        - Results that would hold more than the rule above allows, or need over 256 MiB to compute.
        - A result that reaches the caller, who may write to it.
        - A parameter or buffer that the program updates, or that shares its storage with one, is no constant.
        - Inputs whose values are not known (no state, fake or meta tensors), devices that are not here.
        - Nodes that draw random numbers, have effects, or leave memory uninitialised (empty) are no constants.
        - In a training program only CONSTANT inputs and case 3 count, and only in forward.
    """

    name: ClassVar[str] = "fold_constants"

    def run(self, program: Program) -> PassResult:
        """Return the program with constants folded; one change per group of results that was folded together."""
        refusals: list[Refusal] = []
        plan = _plan(program, refusals)
        new, changes, baked = program.copy(), [], set(program.baked)
        nodes = {node.name: node for node in new.graph.nodes}
        for group in plan:
            values = _evaluate(program, group, refusals)
            if values is None:
                continue
            readers = [user for node in group.nodes for user in nodes[node.name].users]
            after, replaced = [], []
            for result, value in zip(group.results, values, strict=True):
                old = nodes[result.name]
                constant, new = add_constant(new, f"folded_{result.name}", value)
                old.replace_all_uses_with(constant)
                after.append(constant.name)
                replaced.append(old)
            before = tuple(erase_unused(new.graph, [*readers, *replaced])[::-1])
            baked |= {source.name for source in group.sources if source.name not in group.constants}
            nbytes = sum(int(value.untyped_storage().nbytes()) for value in values)
            summary = f"folded {len(before)} nodes into {len(after)} constants of {nbytes} bytes"
            changes.append(Change(summary, before, tuple(after)))
        if not changes:
            return PassResult(program, (), tuple(refusals))
        new, _ = drop_unused_constants(new)
        forget_inplace(new.graph)
        return PassResult(new.finish(baked=frozenset(baked)), tuple(changes), tuple(refusals))


@dataclasses.dataclass(frozen=True)
class _Group:
    """Results that are folded together.

    Attributes:
        results: the nodes to replace, in order.
        nodes: all call nodes to compute for them, in order.
        sources: the placeholders that these read.
        constants: the names of those sources that are of kind CONSTANT.
    """

    results: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    sources: tuple[fx.Node, ...]
    constants: frozenset[str]

    @property
    def nbytes(self) -> int:
        """The bytes that the results hold."""
        return sum({key: size for node in self.results for key, size in storages(node).items()}.values())


# -- what is constant, and what of it is worth folding --------------------------------------------------------------


def _plan(program: Program, refusals: list[Refusal]) -> list[_Group]:
    """The groups to fold, in order, within the allowance."""
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    results = _results(program, _constant_nodes(program), refusals)
    plan: list[_Group] = []
    left = ALLOWANCE
    for group in _components(program, order, results):
        cost = group.nbytes - _freed(group)
        if cost <= left:
            left -= max(cost, 0)
            plan.append(group)
            continue
        for result in sorted(group.results, key=lambda node: (sum(storages(node).values()), order[node])):
            alone = _group(program, order, (result,))
            if alone.nbytes <= left:
                left -= alone.nbytes
                plan.append(alone)
            else:
                reason = f"its {alone.nbytes} bytes would be held for good, {left} bytes of the allowance are left"
                refusals.append(Refusal(result.name, reason))
    return plan


def _constant_nodes(program: Program) -> set[fx.Node]:
    """The nodes whose values are the same in every call, as far as the structure says."""
    entries = {entry.name: entry for entry in program.inputs}
    kinds = {InputKind.CONSTANT}
    if not program.training:
        kinds |= {InputKind.PARAMETER, InputKind.BUFFER}
    updated = program.mutated
    moving = {key for node in program.placeholders if node.name in updated for key in _real_storages(program, node)}
    constant: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            held = _real_storages(program, node)
            if not _is_strided(node):
                continue
            if entries[node.name].kind in kinds and node.name not in updated and not moving & held:
                constant.add(node)
        elif all(argument in constant for argument in node.all_input_nodes) and _is_foldable(node, program.training):
            constant.add(node)
    return constant


def _real_storages(program: Program, node: fx.Node) -> set[int]:
    """Keys of the storages behind a placeholder: the fake one, and the real one, which tied tensors share."""
    held = set(storages(node))
    value = program.state.get(node.name)
    if value is not None and value.layout is torch.strided:
        held.add(storage_id(value))
    return held


def _is_strided(node: fx.Node) -> bool:
    return all(value.layout is torch.strided for value in tensors_of(node))


def _is_foldable(node: fx.Node, training: bool) -> bool:
    if (
        node.op != "call_function"
        or is_random(node)
        or is_effectful(node)
        or not tensors_of(node)
        or not _is_strided(node)
    ):
        return False
    if training and node.meta.get("phase") is not Phase.FORWARD:
        return False
    return node.target is operator.getitem or "empty" not in str(node.target)


def _results(program: Program, constant: set[fx.Node], refusals: list[Refusal]) -> list[fx.Node]:
    """The last computed values of the constant part: computed, and read by the rest, directly or through views."""
    returned = returned_storages(program)
    read: set[fx.Node] = set()
    results: list[fx.Node] = []
    for node in reversed(program.graph.nodes):
        if node.op != "call_function" or node not in constant:
            continue
        if node not in read and all(user in constant or _is_unread(user) for user in node.users):
            continue
        if not _is_computed(node):
            read.update(argument for argument in node.all_input_nodes)
        elif returned & storages(node).keys():
            refusals.append(Refusal(node.name, "it is returned to the caller, who may write to it"))
        elif len(tensors_of(node)) == 1 and isinstance(node.meta["val"], torch.Tensor):
            results.append(node)
    return results[::-1]


def _is_unread(node: fx.Node) -> bool:
    return node.op == "call_function" and not node.users and not is_effectful(node)


def _is_computed(node: fx.Node) -> bool:
    """Whether the node's value is in memory of its own, not that of an operand."""
    if node.target is operator.getitem:
        return _is_computed(node.all_input_nodes[0])
    own = storages(node).keys()
    return not any(own & storages(argument).keys() for argument in node.all_input_nodes)


# -- groups ---------------------------------------------------------------------------------------------------------


def _group(program: Program, order: dict[fx.Node, int], results: tuple[fx.Node, ...]) -> _Group:
    ordered = sorted(ancestors(results), key=order.__getitem__)
    sources = tuple(node for node in ordered if node.op == "placeholder")
    own = frozenset(node.name for node in sources if program.input_of(node.name).kind is InputKind.CONSTANT)
    return _Group(results, tuple(node for node in ordered if node.op == "call_function"), sources, own)


def _components(program: Program, order: dict[fx.Node, int], results: list[fx.Node]) -> list[_Group]:
    """Group the results that share a CONSTANT input or a computation: only together do they make it dead."""
    kinds = {entry.name: entry.kind for entry in program.inputs}
    parent: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while parent.setdefault(node, node) is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    needed: set[fx.Node] = set(results)
    for node in reversed(program.graph.nodes):
        if node not in needed:
            continue
        for argument in node.all_input_nodes:
            needed.add(argument)
            if argument.op == "call_function" or kinds[argument.name] is InputKind.CONSTANT:
                parent[find(argument)] = find(node)
    members: dict[fx.Node, list[fx.Node]] = {}
    for result in results:
        members.setdefault(find(result), []).append(result)
    return [_group(program, order, tuple(group)) for group in members.values()]


def _freed(group: _Group) -> int:
    """The bytes of the CONSTANT inputs that nothing reads once the group is folded."""
    results, dead = set(group.results), set[fx.Node]()
    for node in reversed(group.nodes):
        if node in results or all(user in dead or _is_unread(user) for user in node.users):
            dead.add(node)
    freed: dict[int, int] = {}
    for source in group.sources:
        if source.name in group.constants and all(user in dead for user in source.users):
            freed.update(storages(source))
    return sum(freed.values())


# -- computing ------------------------------------------------------------------------------------------------------


def _evaluate(program: Program, group: _Group, refusals: list[Refusal]) -> list[torch.Tensor] | None:
    """The real results of the group; None, with a refusal for each, when they cannot be computed here."""
    try:
        return _compute(program, group)
    except _NotHere as error:
        refusals.extend(Refusal(result.name, str(error)) for result in group.results)
        return None


class _NotHere(Exception):
    """The group cannot be computed here; the message says why."""


def _compute(program: Program, group: _Group) -> list[torch.Tensor]:
    values: dict[fx.Node, Any] = {}
    for source in group.sources:
        value = program.state.get(source.name)
        if value is None or isinstance(value, FakeTensor) or value.is_meta:
            raise _NotHere(f"the values of {source.name} are not known")
        values[source] = _checked(source, value)
    needed = {key: size for node in group.nodes for key, size in storages(node).items() if _is_computed(node)}
    if sum(needed.values()) > WORKSPACE:
        raise _NotHere(f"computing it would take {sum(needed.values())} bytes")
    with no_modes(), torch.inference_mode(False), torch.no_grad():
        for node in group.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
            try:
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            except Exception as error:
                raise _NotHere(f"{node.name} fails: {str(error).partition(chr(10))[0]}") from error
    return [_checked(result, values[result]) for result in group.results]


def _checked(node: fx.Node, value: torch.Tensor) -> torch.Tensor:
    """The value, if it looks as the program says; a program may be planned for a device that is not here."""
    expected = node.meta["val"]
    if describe(value) != describe(expected):
        raise _NotHere(f"{node.name} is {describe(value)} here, and {describe(expected)} in the program")
    return value
