"""What the operators of a backward pass do to the batch, beside those of `batch_rules`; weights' gradients are sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from memopt.patterns.batch import Batched, NotBatched, Rule, Summed, rule_for
from memopt.patterns.batch_operands import Function, Kinds, States, apart, batched, place
from memopt.patterns.batch_rules import RESIZES, sampled
from memopt.patterns.elements import shape
from memopt.program import argument
from memopt.torch_compat.inductor_prims import prims
from memopt.torch_compat.operators import operator_name

aten = torch.ops.aten


def gradient_rule(node: fx.Node, states: States, size: int) -> Rule:
    """What the node makes of its operands' batches, in either phase of a training step.

    Raises:
        NotBatched: the entries of a sample would depend on other samples, or the operator is not known.
    """
    known = RULES.get(node.target)
    if known is None or all(states[operand] is None for operand in node.all_input_nodes):
        return rule_for(node, states, size)
    return known(node, states, size)


def _together(node: fx.Node, states: States) -> Batched:
    """The batch that all operands have alike."""
    found = {batched(operand, states) for operand in node.all_input_nodes}
    state = found.pop()
    if found or state is None:
        raise NotBatched(f"{node.target} meets operands that lie differently along the batch")
    return state


def _convolution(node: fx.Node, states: States, size: int) -> Rule:
    """The input's gradient sample by sample; those of weight and bias are sums over the samples."""
    gradient, image, weight = node.args[:3]
    state = batched(gradient, states)
    if state is None or state.dim or batched(image, states) != state or batched(weight, states) is not None:
        raise NotBatched(f"{node.target} meets a gradient and an input that lie differently along the batch")
    if len(shape(image)) != len(shape(weight)):
        raise NotBatched(f"{node.target} of one sample without a batch")
    return Rule((state, Summed(), Summed()))


def _sum(node: fx.Node, states: States, size: int) -> Rule:
    state, rank = batched(node.args[0], states), len(shape(node.args[0]))
    dims: Any = argument(node, "dim")
    if state is not None and state.dim in [dim % rank for dim in dims or range(rank)]:
        return Rule(Summed())
    return rule_for(node, states, size)


def _planes(node: fx.Node, states: States, size: int) -> Rule:
    """Pooling of the last two dimensions of (batch, channels, height, width), and its gradients."""
    state = _together(node, states)
    if state.dim or len(shape(node.all_input_nodes[0])) != 4:
        raise NotBatched(f"{node.target} with the batch in dimension {state.dim}")
    single = isinstance(node.meta["val"], torch.Tensor)
    return Rule(state if single else (state,) * len(node.meta["val"]))


def _resized(node: fx.Node, states: States, size: int) -> Rule:
    """The gradient of resizing, which is told the size of its result."""
    sizes: Any = argument(node, "input_size")
    state = _together(node, states)
    if state.dim:
        raise NotBatched(f"{node.target} with the batch in dimension {state.dim}")
    position = place(node, "input_size")
    return Rule(state, resize=lambda samples: {position: [samples * state.inner, *sizes[1:]]})


def _elements(node: fx.Node, states: States, size: int) -> Rule:
    return Rule(_together(node, states))


def _softmax(node: fx.Node, states: States, size: int) -> Rule:
    state = _together(node, states)
    apart(node, state, [argument(node, "dim")], len(shape(node)))
    return Rule(state)


def _scattered(node: fx.Node, states: States, size: int) -> Rule:
    """Sums at places along another dimension than the batch: what a sample adds lands in its own rows."""
    total, dim, index, values = node.args[:4]
    state, own = batched(index, states), batched(total, states)
    if state is None or batched(values, states) != state or own not in (None, state):
        raise NotBatched(f"{node.target} meets operands that lie differently along the batch")
    assert isinstance(total, fx.Node) and isinstance(dim, int)
    apart(node, state, [dim], len(shape(node)))
    if len({shape(operand)[state.dim] for operand in (total, index, values)}) > 1:
        raise NotBatched(f"{node.target} adds fewer rows than there are")
    return Rule(state, {} if own is not None else {total: state})


_KINDS: Kinds = (
    (_convolution, (aten.convolution_backward.default,)),
    (_sum, (aten.sum.dim_IntList,)),
    (_planes, (
        aten.max_pool2d_with_indices_backward.default, aten.avg_pool2d_backward.default,
        aten._adaptive_avg_pool2d_backward.default, prims._low_memory_max_pool_with_offsets.default,
        prims._low_memory_max_pool_offsets_to_indices.default, aten.reflection_pad2d_backward.default,
        aten.replication_pad2d_backward.default,
    )),
    (_resized, tuple(getattr(aten, f"{operator_name(resize)}_backward").default for resize in RESIZES)),
    (sampled, (aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)),
    (_elements, (aten.native_dropout_backward.default,)),
    (_scattered, (aten.scatter_add.default,)),
    (_softmax, (aten._log_softmax_backward_data.default, aten._softmax_backward_data.default)),
)  # fmt: skip
RULES: Mapping[Any, Function] = {target: function for function, targets in _KINDS for target in targets}
