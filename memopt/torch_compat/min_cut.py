"""Torch's own partition of a joint graph; tried on 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._functorch import partitioners


def min_cut(
    module: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph as torch.compile's min-cut partition has them, for Inductor.

    Args:
        module: a joint graph; it is edited.
        joint_inputs: its inputs.
        options: what AOTAutograd gives to a partitioner, `num_fwd_outputs` among it.
    """
    halves: tuple[fx.GraphModule, fx.GraphModule] = partitioners.min_cut_rematerialization_partition(
        module, joint_inputs, compiler="inductor", **options
    )
    return halves
