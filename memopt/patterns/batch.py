"""Which dimension of each value is the batch: proved operator by operator, or refused with the reason.

A value is *independent* of the batch, or *batched*: its dimension `dim` counts samples, `inner` consecutive entries for
each (a view of (batch, sequence, width) as (batch · sequence, width) has `inner = sequence`), and the entries of one
sample are computed from entries of that sample and independent values alone. So the program may be run on some samples
at a time. What each operator does to that is in `batch_rules`; an operator that is not there is refused.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx

from memopt.program import InputKind, Program, is_effectful, is_random
from memopt.torch_compat.operators import OpOverload


class NotBatched(Exception):
    """An operator's result is not computed sample by sample, or is not known to be; the message says why."""


@dataclasses.dataclass(frozen=True)
class Batched:
    """The batch is dimension `dim`, with `inner` consecutive entries for each sample."""

    dim: int
    inner: int = 1


@dataclasses.dataclass(frozen=True)
class Summed:
    """A sum over the samples: that over all of them is the sum of those over some (a weight's gradient)."""


# What is known of a value: batched, summed over the batch, independent of it (None), or one such for each item of a
# multiple result.
State: TypeAlias = Batched | Summed | tuple["State | NotBatched", ...] | None


@dataclasses.dataclass(frozen=True)
class Rule:
    """What an operator makes of a batch.

    Attributes:
        state: of its result.
        slices: operands that are independent and have an entry for each sample, with how they lie along the batch: a
            chunk of samples reads that part of them.
        resize: takes the number of samples in a chunk and gives new arguments by position, where they hold sizes.
    """

    state: State
    slices: Mapping[fx.Node, Batched] = dataclasses.field(default_factory=dict)
    resize: Callable[[int], Mapping[int, Any]] | None = None


@dataclasses.dataclass(frozen=True)
class Batch:
    """A program's batch.

    Attributes:
        size: the number of samples.
        states: what is known of each node's value; nodes that nothing can be said of are missing.
        rules: by call node, for those that are batched.
        reasons: by node that was refused, why.
    """

    size: int
    states: Mapping[fx.Node, State]
    rules: Mapping[fx.Node, Rule]
    reasons: Mapping[fx.Node, str]


NO_BATCH = "no input has a first dimension of two or more: there is no batch to divide"


def batch_of(program: Program) -> int:
    """Samples in the batch: the first dimension of the caller's first tensor that has two or more; 0 without one."""
    for node, entry in zip(program.placeholders, program.inputs, strict=True):
        value = node.meta["val"]
        if entry.kind is InputKind.USER and isinstance(value, torch.Tensor) and value.dim() and value.shape[0] > 1:
            return int(value.shape[0])
    return 0


def find_batch(program: Program) -> Batch:
    """Take dimension 0 of the caller's tensors as the batch and follow it through an inference program.

    Tensors of the caller's whose first dimension has another size than that of the first one are independent. That is
    no assumption about what they mean: what is proved holds for any dimension so named.

    Raises:
        NotBatched: the caller gives no tensor with a first dimension of two or more.
    """
    states: dict[fx.Node, State] = {}
    rules: dict[fx.Node, Rule] = {}
    reasons: dict[fx.Node, str] = {}
    size = batch_of(program)
    if not size:
        raise NotBatched(NO_BATCH)
    for node, entry in zip(program.placeholders, program.inputs, strict=True):
        value = node.meta["val"]
        counted = entry.kind is InputKind.USER and isinstance(value, torch.Tensor) and value.dim() > 0
        states[node] = Batched(0) if counted and value.shape[0] == size else None
    for node in program.calls:
        missing = next((operand for operand in node.all_input_nodes if operand not in states), None)
        if missing is not None:
            reasons[node] = f"it reads {missing.name}, of which nothing is known"
            continue
        try:
            rule = rule_for(node, states, size)
        except NotBatched as error:
            reasons[node] = str(error)
            continue
        states[node] = rule.state
        if any(states[operand] is not None for operand in node.all_input_nodes):
            rules[node] = rule
    return Batch(size, states, rules, reasons)


def rule_for(node: fx.Node, states: Mapping[fx.Node, State], size: int) -> Rule:
    """What the node makes of its operands' batches.

    Raises:
        NotBatched: the entries of a sample would depend on other samples, or the operator is not known.
    """
    from memopt.patterns.batch_rules import RULES, pointwise

    if all(states[operand] is None for operand in node.all_input_nodes):
        return Rule(None)
    target = node.target
    if target is operator.getitem:
        whole, index = states[node.args[0]], node.args[1]  # type: ignore[index]
        assert isinstance(whole, tuple) and isinstance(index, int)
        item = whole[index]
        if isinstance(item, NotBatched):
            raise item
        return Rule(item)
    if any(isinstance(states[operand], tuple) for operand in node.all_input_nodes):
        raise NotBatched(f"{target} takes several results at once")
    if target in RULES:
        return RULES[target](node, states, size)
    if is_random(node):
        raise NotBatched(f"{target} draws random numbers for the whole batch")
    if is_effectful(node) or not isinstance(target, OpOverload):
        raise NotBatched(f"{target} does more than compute its value, or is not known")
    if torch.Tag.pointwise in target.tags:
        return pointwise(node, states, size)
    raise NotBatched(f"{target} is not known to work sample by sample")
