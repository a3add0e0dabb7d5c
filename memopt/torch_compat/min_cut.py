"""Joint graphs partitioned by torch, by its min-cut or at given saved values; tried on 2.11 and 2.13."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._functorch import partitioners
from torch.utils._ordered_set import OrderedSet

from memopt.torch_compat.fx_graphs import unchecked_copies


def min_cut(
    module: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph as torch.compile's min-cut partition has them, for Inductor.

    Args:
        module: a joint graph; it is edited.
        joint_inputs: its inputs.
        options: what AOTAutograd gives to a partitioner, `num_fwd_outputs` among it.
    """
    with unchecked_copies():
        graphs: tuple[fx.GraphModule, fx.GraphModule] = partitioners.min_cut_rematerialization_partition(
            module, joint_inputs, compiler="inductor", **options
        )
    return graphs


def partition_at(
    module: fx.GraphModule,
    saved: Sequence[fx.Node],
    forward_outputs: int,
    static: Sequence[fx.Node],
    symbols: Sequence[fx.Node] = (),
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph of a joint graph where forward saves these values.

    Args:
        module: the joint graph; it is left as it is.
        saved: nodes of it; objects that are no tensors (from 2.13 on, a DTensor's device mesh) are handed on apart.
        forward_outputs: results of it that are forward's.
        static: placeholders that lie at the same address in every call.
        symbols: nodes whose values are sizes, which backward gets, too.
    """
    known = inspect.signature(partitioners._extract_fwd_bwd_modules).parameters
    is_object: Any = getattr(partitioners, "is_opaque_node", None)
    apart = [node for node in saved if "saved_opaque_nodes" in known and is_object(node)]
    arguments: dict[str, Any] = {
        "saved_opaque_nodes": apart,
        "saved_sym_nodes": list(symbols),
        "num_fwd_outputs": forward_outputs,
        "static_lifetime_input_nodes": OrderedSet(static),
    }
    with unchecked_copies():
        graphs: tuple[fx.GraphModule, fx.GraphModule] = partitioners._extract_fwd_bwd_modules(
            module,
            [node for node in saved if node not in apart],
            **{name: value for name, value in arguments.items() if name in known},
        )
    return graphs
