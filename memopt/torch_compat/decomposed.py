"""What Inductor makes of operators when it writes them out in simpler ones."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor.decomposition import select_decomp_table


def decomposed(node: fx.Node) -> Any:
    """A node's value on fake tensors as Inductor writes the operator out; None where it does not; tried on 2.13.

    The value lies as that of simpler operators does, which is not always as the operator's own.

    Args:
        node: a call of an operator, whose operands have fake tensors in `meta["val"]`.
    """
    function = select_decomp_table().get(node.target)
    if function is None:
        return None
    try:
        found = function(
            *fx.map_arg(node.args, lambda item: item.meta["val"]),
            **fx.map_arg(node.kwargs, lambda item: item.meta["val"]),
        )
    except Exception:  # whatever it does to fake tensors, Inductor's own trace will say
        return None
    return None if found is NotImplemented else found  # of a product, which is written out for some sizes alone
