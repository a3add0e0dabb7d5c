"""Random numbers in the order in which a graph draws them, in the code that Inductor makes of it.

Its scheduler sorts calls by what they read alone, and calls that draw read nothing of each other: one whose numbers
nothing reads, or that is read late, comes after others. Where Inductor draws as eager does (`fallback_random`, and what
it has no kernel of its own for) all numbers would be others.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from torch import fx
from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import V

from memopt.torch_compat.operators import OpOverload


@functools.cache
def keep_draw_order(draws: Callable[[fx.Node], bool]) -> None:
    """Keep that order from now on in this process; tried on torch 2.13.

    Args:
        draws: whether a node of a graph draws random numbers.
    """
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


def _calls(node: Any, draws: Callable[[fx.Node], bool]) -> bool:
    """Whether a scheduler's node calls an operator that draws."""
    made = node.node
    return isinstance(getattr(made, "op_overload", None), OpOverload) and any(map(draws, made.origins))
