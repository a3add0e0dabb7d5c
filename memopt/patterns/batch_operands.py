"""What rules for the batch ask of a node: how its operands lie along the batch, and what its arguments are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from memopt.patterns.batch import Batched, NotBatched, Rule, State
from memopt.torch_compat.operators import schema_of

States = Mapping[fx.Node, State]
Function = Callable[[fx.Node, States, int], Rule]
Kinds = tuple[tuple[Function, tuple[Any, ...]], ...]  # rules, with the operators that each is for


def batched(node: Any, states: States) -> Batched | None:
    """The state of an argument; None for what is independent, no tensor or absent."""
    state = states[node] if isinstance(node, fx.Node) else None
    assert state is None or isinstance(state, Batched)
    return state


def place(node: fx.Node, name: str) -> int:
    """The position of an argument in the operator's schema."""
    return [entry.name for entry in schema_of(node.target).arguments].index(name)


def first(node: fx.Node, states: States) -> tuple[fx.Node, Batched]:
    """The first operand, which is the only one that is batched.

    Raises:
        NotBatched: it is not batched, or others are.
    """
    x = node.args[0]
    state = batched(x, states)
    others = [operand for operand in node.all_input_nodes if operand is not x and batched(operand, states)]
    if not isinstance(x, fx.Node) or state is None or others:
        raise NotBatched(f"{node.target} with a batch in {', '.join(map(str, others)) or 'no operand'}: no rule")
    return x, state


def apart(node: fx.Node, state: Batched, dims: Sequence[int], rank: int) -> None:
    """Pass where the operator mixes no entries along the batch.

    Raises:
        NotBatched: it works along the batch.
    """
    if state.dim in [dim % rank for dim in dims]:
        raise NotBatched(f"{node.target} works along dimension {state.dim}, which is the batch")
