"""What rewrites have put into a joint graph, as torch's own partition is to take it: each in its own phase."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import fx

from memopt.graph.rewrite import ancestors
from memopt.inductor.order import ADDED
from memopt.program import Phase


def return_early(module: fx.GraphModule, outputs: int, also: Container[fx.Node] = ()) -> int:
    """Have forward return what rewrites compute there for backward only, behind its own outputs; return how many.

    Torch's partitioner computes in forward what that returns, and all else in backward.

    Args:
        module: a joint graph, edited.
        outputs: how many outputs forward has.
        also: what forward has to compute as well where backward reads it.
    """
    result = module.graph.output_node()
    values: list[Any] = list(result.args[0])  # type: ignore[arg-type]
    needed = ancestors([value for value in values[:outputs] if isinstance(value, fx.Node)])
    early = [
        node
        for node in module.graph.nodes
        if (ADDED in node.meta or node in also) and node.meta.get("phase") is Phase.FORWARD and node not in needed
        if any(user.meta.get("phase") is Phase.BACKWARD for user in node.users)
    ]
    result.args = ([*values[:outputs], *early, *values[outputs:]],)
    if "desc" in result.meta:
        result.meta["desc"] = [*result.meta["desc"][:outputs], *[None] * len(early), *result.meta["desc"][outputs:]]
    return len(early)


def mark_added(module: fx.GraphModule, known: Container[str]) -> None:
    """Mark what rewrites have added, nodes that are not `known`; torch's partitioner is to leave it in its phase."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.name not in known:
            node.meta[ADDED] = True
            if node.meta.get("phase") is Phase.BACKWARD:
                node.meta["partitioner_tag"] = "must_be_in_backward"
