"""Folding batch norms into a model's own weights, in place, by consent: `memopt.compile(…, allow=("freeze",))`.

Folded weights beside the model's own would be held twice. Here they take their place: the weight of a layer is scaled,
the batch norm after it is left with a scale of one and the shift, so that the model computes the same function as
before, from other numbers. That is meant for a model that is trained no further.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memopt.passes.fuse_conv_bn import Folding, foldings, is_aliased
from memopt.program import InputKind, Program


def fold_in_place(program: Program) -> list[str]:
    """Fold every batch norm that `FuseConvBn` would, into the model's own tensors.

    Args:
        program: an inference program as captured; the tensors of its `state` are written to, itself is not changed.

    Returns:
        Names of the batch norms' nodes that were folded. None is folded twice: a scale of one is left as it is. Where
        one of the tensors is read elsewhere too, or shares its memory, the batch norm stays.
    """
    kinds = {entry.name: entry.kind for entry in program.inputs}
    folded = []
    with torch.no_grad():
        for norm, folding in foldings(program):
            own = [node for node in (folding.weight, folding.bias, *_operands(norm)) if isinstance(node, fx.Node)]
            if folding.is_scaled_by_one or any(kinds.get(node.name) is InputKind.CONSTANT for node in own):
                continue
            if any(len(node.users) > 1 or is_aliased(program, node) for node in own):
                continue
            if _write(program, norm, folding):
                folded.append(norm.name)
    return folded


def _write(program: Program, norm: fx.Node, folding: Folding) -> bool:
    gamma, beta, mean, variance = _operands(norm)
    one = 1.0 - float(norm.args[6])  # type: ignore[arg-type]
    if one <= 0 or variance is None or mean is None or folding.added:
        return False
    state = program.state
    state[folding.weight.name].copy_(folding.folded_weight)
    if folding.bias is not None:
        state[folding.bias.name].zero_()
    if gamma is not None:
        state[gamma.name].fill_(1.0)
    if beta is not None:
        state[beta.name].copy_(folding.folded_bias)
    state[mean.name].copy_(torch.zeros_like(folding.folded_bias) if beta is not None else -folding.folded_bias)
    state[variance.name].fill_(one)
    return True


def _operands(norm: fx.Node) -> Sequence[Any]:
    return norm.args[1:5]
