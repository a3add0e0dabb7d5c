"""What each operator does to the batch (see `memopt.patterns.batch`): one function for each kind of operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memopt.patterns.batch import Batched, NotBatched, Rule
from memopt.patterns.batch_operands import Function, Kinds, States, apart, batched, first, place
from memopt.patterns.batch_views import VIEWS, along
from memopt.patterns.elements import shape
from memopt.program import argument, tensors_of

aten = torch.ops.aten

# -- element by element -----------------------------------------------------------------------------------------------


def pointwise(node: fx.Node, states: States, size: int) -> Rule:
    """One entry of the result from the entries of the same place, smaller operands being repeated."""
    return _aligned(node, states, size, node.all_input_nodes, len(shape(node)))


def _aligned(node: fx.Node, states: States, size: int, operands: Sequence[fx.Node], rank: int) -> Rule:
    found: Batched | None = None
    for operand in operands:
        state = batched(operand, states)
        if state is None:
            continue
        moved = Batched(state.dim + rank - len(shape(operand)), state.inner)
        if found not in (None, moved):
            raise NotBatched(f"{node.target} meets two batches that lie differently")
        found = moved
    assert found is not None
    slices = {}
    for operand in operands:
        sizes = shape(operand)
        dim = found.dim - (rank - len(sizes))
        if batched(operand, states) is None and dim >= 0 and sizes[dim] > 1:
            if sizes[dim] != size * found.inner:
                raise NotBatched(f"{node.target} repeats {operand.name} along the batch")
            slices[operand] = Batched(dim, found.inner)
    return Rule(found, slices)


def _check(node: fx.Node, states: States, size: int) -> Rule:
    """An assertion that torch.export wrote down."""
    _, state = first(node, states)
    if argument(node, "size") is not None or argument(node, "stride") is not None:
        raise NotBatched(f"{node.target} asserts sizes of the whole batch")
    return Rule(state)


def _same(node: fx.Node, states: States, size: int) -> Rule:
    return Rule(first(node, states)[1])


# -- sums along dimensions --------------------------------------------------------------------------------------------


def _reduction(node: fx.Node, states: States, size: int) -> Rule:
    x, state = first(node, states)
    rank = len(shape(x))
    given = argument(node, "dim")
    dims = list(range(rank)) if given is None or given == [] else [given] if isinstance(given, int) else list(given)
    apart(node, state, dims, rank)
    keeps = bool(argument(node, "keepdim"))
    below = 0 if keeps else sum(dim % rank < state.dim for dim in dims)
    moved = Batched(state.dim - below, state.inner)
    single = isinstance(node.meta["val"], torch.Tensor)
    return Rule(moved if single else (moved,) * len(node.meta["val"]))


def _over_all(node: fx.Node, states: States, size: int) -> Rule:
    raise NotBatched(f"{node.target} reduces over the batch")


def _normalised(node: fx.Node, states: States, size: int) -> Rule:
    """Layer norm and RMS norm: over the last dimensions."""
    x, state = first(node, states)
    if state.dim >= len(shape(x)) - len(argument(node, "normalized_shape")):
        raise NotBatched(f"{node.target} normalises over the batch")
    return Rule((state,) * len(tensors_of(node)))


def _group_norm(node: fx.Node, states: States, size: int) -> Rule:
    _, state = first(node, states)
    if state.dim != 0:
        raise NotBatched(f"{node.target} with the batch in dimension {state.dim}")
    return Rule((state,) * len(tensors_of(node)), resize=lambda samples: {place(node, "N"): samples * state.inner})


def _batch_norm(node: fx.Node, states: States, size: int) -> Rule:
    """In eval mode: element by element, with numbers for each channel."""
    _, state = first(node, states)
    if state.dim == 1:
        raise NotBatched(f"{node.target} with the batch in the channels")
    unused = NotBatched("statistics that eval mode does not compute")
    return Rule((state, unused, unused))


def _trained_norm(node: fx.Node, states: States, size: int) -> Rule:
    """Over all dimensions but the channels; an instance norm has the samples there."""
    x, state = first(node, states)
    if node.target is aten._native_batch_norm_legit.no_stats and state.dim == 1:
        of_channels = [operand for operand in node.all_input_nodes if operand is not x]
        moved = Batched(0, state.inner)
        return Rule((state, moved, moved), dict.fromkeys(of_channels, moved))
    raise NotBatched("a batch norm in training mode takes mean and variance over the whole batch")


# -- products ---------------------------------------------------------------------------------------------------------


def _product(left: Any, right: Any, states: States, size: int, node: fx.Node, lead: int) -> Rule:
    """Left (…, n, k) times right (…, k, m), with `lead` dimensions before."""
    one, other = batched(left, states), batched(right, states)
    state = one or other
    assert state is not None
    if lead and state.dim == 0:
        if one and other and one != other:
            raise NotBatched(f"{node.target} meets two batches that lie differently")
        return Rule(state, {operand: state for operand, own in ((left, one), (right, other)) if own is None})
    if one is not None and other is not None:
        raise NotBatched(f"{node.target} sums over the batch, or pairs samples with each other")
    if state.dim != (lead if one is not None else lead + 1):
        raise NotBatched(f"{node.target} sums over the batch")
    return Rule(state)


def _mm(node: fx.Node, states: States, size: int) -> Rule:
    return _product(node.args[0], node.args[1], states, size, node, 1 if node.target is aten.bmm.default else 0)


def _addmm(node: fx.Node, states: States, size: int) -> Rule:
    bias, left, right = node.args[:3]
    if batched(left, states) is None and batched(right, states) is None:
        raise NotBatched(f"{node.target} with a batch in what is added only")
    rule = _product(left, right, states, size, node, 1 if node.target is aten.baddbmm.default else 0)
    state = rule.state
    assert isinstance(state, Batched) and isinstance(bias, fx.Node)
    sizes, rank = shape(bias), len(shape(node))
    own, dim = batched(bias, states), state.dim - (rank - len(sizes))
    if own is not None and Batched(own.dim + rank - len(sizes), own.inner) != state:
        raise NotBatched(f"{node.target} meets two batches that lie differently")
    if own is None and dim >= 0 and sizes[dim] > 1:
        return Rule(state, {**rule.slices, bias: Batched(dim, state.inner)})
    return rule


def _convolution(node: fx.Node, states: States, size: int) -> Rule:
    x, state = first(node, states)
    if state.dim != 0 or len(shape(x)) != len(shape(node.args[1])):
        raise NotBatched(f"{node.target} with the batch in dimension {state.dim} of {len(shape(x))}")
    return Rule(state)


def _attention(node: fx.Node, states: States, size: int) -> Rule:
    """softmax(QKᵀ)V over (batch, heads, tokens, width); what else the fused operators return is not followed."""
    query, key, value = node.args[:3]
    if argument(node, "dropout_p") != 0.0:
        raise NotBatched(f"{node.target} draws random numbers for the whole batch")
    state = batched(query, states)
    if state is None or state.dim != 0 or batched(key, states) != state or batched(value, states) != state:
        raise NotBatched(f"{node.target} meets queries, keys and values that lie differently along the batch")
    masks = [argument(node, name) for name in ("attn_mask", "attn_bias")]
    mask = next((value for value in masks if value is not None), None)
    slices = {}
    if isinstance(mask, fx.Node):
        rank, own = len(shape(mask)), batched(mask, states)
        if own is not None and (rank != 4 or own != state):
            raise NotBatched(f"{node.target} meets a mask that lies differently along the batch")
        if own is None and rank == 4 and shape(mask)[0] > 1:
            slices[mask] = state
    single = isinstance(node.meta["val"], torch.Tensor)
    rest = NotBatched(f"another result of {node.target} than the attended values")
    return Rule(state if single else (state, *(rest for _ in node.meta["val"][1:])), slices)


# -- others -----------------------------------------------------------------------------------------------------------


def _spatial(node: fx.Node, states: States, size: int) -> Rule:
    """Pooling and resizing of the last two dimensions of (batch, channels, height, width)."""
    x, state = first(node, states)
    if len(shape(x)) != 4 or state.dim > 1:
        raise NotBatched(f"{node.target} with the batch in dimension {state.dim} of {len(shape(x))}")
    single = isinstance(node.meta["val"], torch.Tensor)
    return Rule(state if single else (state,) * len(node.meta["val"]))


def _resampled(node: fx.Node, states: States, size: int) -> Rule:
    """Resizing of all dimensions behind (batch, channels)."""
    _, state = first(node, states)
    if state.dim > 1:
        raise NotBatched(f"{node.target} with the batch in dimension {state.dim}")
    return Rule(state)


def _shuffled(node: fx.Node, states: States, size: int) -> Rule:
    """Channels and places in exchange for each other, behind the batch."""
    x, state = first(node, states)
    if len(shape(x)) != 4 or state.dim:
        raise NotBatched(f"{node.target} with the batch in dimension {state.dim} of {len(shape(x))}")
    return Rule(state)


def _turned(node: fx.Node, states: States, size: int) -> Rule:
    x, state = first(node, states)
    dims: Any = argument(node, "dims")
    apart(node, state, dims or range(len(shape(x))), len(shape(x)))  # without dims, all entries roll as one row
    return Rule(state)


def sampled(node: fx.Node, states: States, size: int) -> Rule:
    """Values of images at places of a grid, and their gradients: what has none of the samples has a row for each.

    Raises:
        NotBatched: its operands lie differently along the batch.
    """
    found = {batched(operand, states) for operand in node.all_input_nodes} - {None}
    state = found.pop()
    if found or state is None or state.dim:
        raise NotBatched(f"{node.target} meets operands that lie differently along the batch")
    single = isinstance(node.meta["val"], torch.Tensor)
    slices = {operand: state for operand in node.all_input_nodes if batched(operand, states) is None}
    return Rule(state if single else (state,) * len(node.meta["val"]), slices)


def _pad(node: fx.Node, states: States, size: int) -> Rule:
    x, state = first(node, states)
    pad: Any = node.args[1]
    rank = len(shape(x))
    apart(node, state, [rank - 1 - index // 2 for index, amount in enumerate(pad) if amount], rank)
    return Rule(state)


def _triangle(node: fx.Node, states: States, size: int) -> Rule:
    x, state = first(node, states)
    apart(node, state, [-1, -2], len(shape(x)))
    return Rule(state)


def _embedding(node: fx.Node, states: States, size: int) -> Rule:
    weight, indices = node.args[:2]
    state = batched(indices, states)
    if state is None or batched(weight, states) is not None:
        raise NotBatched("embedding with a table for each sample")
    return Rule(state)


def _gather(node: fx.Node, states: States, size: int) -> Rule:
    x, dim, index = node.args[:3]
    one, other = batched(x, states), batched(index, states)
    state = one or other
    assert state is not None and isinstance(x, fx.Node) and isinstance(index, fx.Node)
    apart(node, state, [dim], len(shape(x)))  # type: ignore[list-item]
    if (one and other and one != other) or shape(x)[state.dim] != shape(index)[state.dim]:
        raise NotBatched(f"{node.target} meets two batches that lie differently")
    return Rule(state, {operand: state for operand, own in ((x, one), (index, other)) if own is None})


def _index(node: fx.Node, states: States, size: int) -> Rule:
    """x[i, j, …] with an independent x and indices of its first dimensions."""
    x, indices = node.args[:2]
    given = [index for index in indices if index is not None]  # type: ignore[union-attr]
    if batched(x, states) is not None or given != list(indices)[: len(given)]:  # type: ignore[arg-type]
        raise NotBatched(f"{node.target} picks entries out of the batch")
    rank = max(len(shape(index)) for index in given)
    if any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in given):
        raise NotBatched(f"{node.target} with a mask has as many results as the mask has true entries")
    return _aligned(node, states, size, given, rank)


_ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default, aten.scaled_dot_product_attention.default,
)  # fmt: skip
# Resizing by kernels of eager's, each with one for its gradient.
RESIZES = (
    aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default, aten.upsample_linear1d.default, aten.upsample_bilinear2d.default,
    aten.upsample_trilinear3d.default, aten.upsample_bicubic2d.default, aten._upsample_bilinear2d_aa.default,
    aten._upsample_bicubic2d_aa.default,
)  # fmt: skip
_KINDS: Kinds = (
    *VIEWS,
    (_same, (
        aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default, aten.contiguous.default,
        aten.hardswish.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.lift_fresh_copy.default,
    )),
    (_check, (aten._assert_tensor_metadata.default,)),
    (pointwise, (aten.copy.default, aten.masked_fill.Tensor)),
    (along("dim"), (
        aten.split.Tensor, aten.split_with_sizes.default, aten._softmax.default, aten._log_softmax.default,
        aten.cumsum.default, aten.cumprod.default, aten.topk.default, aten.sort.default, aten.sort.stable,
        aten.glu.default, aten.index_select.default,
    )),
    (_reduction, (
        aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.any.dim, aten.all.dim,
        aten.any.dims, aten.all.dims, aten.var.correction, aten.var_mean.correction, aten.std.correction,
        aten.argmax.default, aten.argmin.default, aten.prod.dim_int, aten.max.dim, aten.min.dim,
        aten.logsumexp.default, aten.linalg_vector_norm.default,
    )),
    (_over_all, (aten.sum.default, aten.mean.default, aten.max.default, aten.min.default, aten.any.default,
                 aten.all.default, aten.prod.default)),
    (_normalised, (aten.native_layer_norm.default, aten._fused_rms_norm.default)),
    (_group_norm, (aten.native_group_norm.default,)),
    (_batch_norm, (aten._native_batch_norm_legit_no_training.default,)),
    (_trained_norm, (
        aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
    )),
    (_mm, (aten.mm.default, aten.bmm.default)),
    (_addmm, (aten.addmm.default, aten.baddbmm.default, aten._addmm_activation.default)),
    (_convolution, (aten.convolution.default,)),
    (_attention, _ATTENTION),
    (_spatial, (
        aten.max_pool2d_with_indices.default, aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default,
        aten.reflection_pad2d.default, aten.replication_pad2d.default,
    )),
    (_resampled, (
        *RESIZES, aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec,
        aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_trilinear3d.vec,
        aten.upsample_bicubic2d.vec,
    )),
    (_shuffled, (aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.channel_shuffle.default)),
    (_turned, (aten.roll.default, aten.flip.default)),
    (sampled, (aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)),
    (_pad, (aten.constant_pad_nd.default,)),
    (_triangle, (aten.tril.default, aten.triu.default)),
    (_embedding, (aten.embedding.default,)),
    (_gather, (aten.gather.default,)),
    (_index, (aten.index.Tensor,)),
)  # fmt: skip
RULES: Mapping[Any, Function] = {target: function for function, targets in _KINDS for target in targets}
