"""What each operator does to the batch (see `memopt.patterns.batch`): one function for each kind of operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memopt.patterns.batch import Batched, NotBatched, Rule, State
from memopt.program import tensors_of

aten = torch.ops.aten

States = Mapping[fx.Node, State]
Function = Callable[[fx.Node, States, int], Rule]


def _batched(node: Any, states: States) -> Batched | None:
    """The state of an argument; None for what is independent, no tensor or absent."""
    state = states[node] if isinstance(node, fx.Node) else None
    assert state is None or isinstance(state, Batched)
    return state


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _argument(node: fx.Node, name: str) -> Any:
    """An argument by its name in the operator's schema, or its default."""
    for index, entry in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if entry.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name, entry.default_value)
    raise KeyError(name)


def _place(node: fx.Node, name: str) -> int:
    """The position of an argument in the operator's schema."""
    return [entry.name for entry in node.target._schema.arguments].index(name)  # type: ignore[union-attr]


def _first(node: fx.Node, states: States) -> tuple[fx.Node, Batched]:
    """The first operand, which must be the only one that is batched."""
    x = node.args[0]
    state = _batched(x, states)
    others = [operand for operand in node.all_input_nodes if operand is not x and _batched(operand, states)]
    if not isinstance(x, fx.Node) or state is None or others:
        raise NotBatched(f"{node.target} with a batch in {', '.join(map(str, others)) or 'no operand'}: no rule")
    return x, state


def _apart(node: fx.Node, state: Batched, dims: Sequence[int], rank: int) -> None:
    """Refuse where the operator mixes entries along the batch."""
    if state.dim in [dim % rank for dim in dims]:
        raise NotBatched(f"{node.target} works along dimension {state.dim}, which is the batch")


# -- element by element -----------------------------------------------------------------------------------------------


def pointwise(node: fx.Node, states: States, size: int) -> Rule:
    """One entry of the result from the entries of the same place, smaller operands being repeated."""
    return _aligned(node, states, size, node.all_input_nodes, len(_shape(node)))


def _aligned(node: fx.Node, states: States, size: int, operands: Sequence[fx.Node], rank: int) -> Rule:
    found: Batched | None = None
    for operand in operands:
        state = _batched(operand, states)
        if state is None:
            continue
        moved = Batched(state.dim + rank - len(_shape(operand)), state.inner)
        if found not in (None, moved):
            raise NotBatched(f"{node.target} meets two batches that lie differently")
        found = moved
    assert found is not None
    slices = {}
    for operand in operands:
        shape = _shape(operand)
        dim = found.dim - (rank - len(shape))
        if _batched(operand, states) is None and dim >= 0 and shape[dim] > 1:
            if shape[dim] != size * found.inner:
                raise NotBatched(f"{node.target} repeats {operand.name} along the batch")
            slices[operand] = Batched(dim, found.inner)
    return Rule(found, slices)


def _check(node: fx.Node, states: States, size: int) -> Rule:
    """An assertion that torch.export wrote down."""
    _, state = _first(node, states)
    if _argument(node, "size") is not None or _argument(node, "stride") is not None:
        raise NotBatched(f"{node.target} asserts sizes of the whole batch")
    return Rule(state)


def _same(node: fx.Node, states: States, size: int) -> Rule:
    return Rule(_first(node, states)[1])


# -- views ------------------------------------------------------------------------------------------------------------


def _view(node: fx.Node, states: States, size: int) -> Rule:
    x, state = _first(node, states)
    before, after = _shape(x), _shape(node)
    if not math.prod(before):
        raise NotBatched("a tensor without entries")
    outer, rest = math.prod(before[: state.dim]), state.inner * math.prod(before[state.dim + 1 :])
    for dim in range(len(after)):
        inner, left = divmod(after[dim], size)
        if math.prod(after[:dim]) == outer and not left and inner * math.prod(after[dim + 1 :]) == rest:

            def resize(samples: int, dim: int = dim, inner: int = inner) -> dict[int, Any]:
                return {1: [*after[:dim], samples * inner, *after[dim + 1 :]]}

            return Rule(Batched(dim, inner), resize=resize)
    raise NotBatched(
        f"the view {list(before)} → {list(after)} merges the batch with a dimension before it, or splits it"
    )


def _permute(node: fx.Node, states: States, size: int) -> Rule:
    x, state = _first(node, states)
    dims = [dim % len(_shape(x)) for dim in _argument(node, "dims")]
    return Rule(Batched(dims.index(state.dim), state.inner))


def _transpose(node: fx.Node, states: States, size: int) -> Rule:
    x, state = _first(node, states)
    rank = len(_shape(x))
    if rank < 2:
        return Rule(state)
    one, other = (0, 1) if node.target is aten.t.default else [_argument(node, f"dim{i}") % rank for i in (0, 1)]
    return Rule(Batched({one: other, other: one}.get(state.dim, state.dim), state.inner))


def _unsqueeze(node: fx.Node, states: States, size: int) -> Rule:
    x, state = _first(node, states)
    dim = _argument(node, "dim") % (len(_shape(x)) + 1)
    return Rule(Batched(state.dim + (dim <= state.dim), state.inner))


def _squeeze(node: fx.Node, states: States, size: int) -> Rule:
    x, state = _first(node, states)
    shape = _shape(x)
    if len(node.args) > 1:
        given: Any = node.args[1]
        dims = [dim % len(shape) for dim in ([given] if isinstance(given, int) else given)]
    else:  # a chunk of one sample must keep its batch
        raise NotBatched("squeeze() without dimensions would take the batch away where it is 1")
    gone = [dim for dim in dims if shape[dim] == 1]
    _apart(node, state, dims, len(shape))
    return Rule(Batched(state.dim - sum(dim < state.dim for dim in gone), state.inner))


def _expand(node: fx.Node, states: States, size: int) -> Rule:
    x, state = _first(node, states)
    after = _shape(node)
    dim = state.dim + len(after) - len(_shape(x))

    def resize(samples: int) -> dict[int, Any]:
        return {1: [*after[:dim], samples * state.inner, *after[dim + 1 :]]}

    return Rule(Batched(dim, state.inner), resize=resize)


def _repeat(node: fx.Node, states: States, size: int) -> Rule:
    x, state = _first(node, states)
    repeats: Any = node.args[1]
    dim = state.dim + len(repeats) - len(_shape(x))
    if repeats[dim] != 1:
        raise NotBatched("repeat makes copies of samples")
    return Rule(Batched(dim, state.inner))


def _along(*names: str, gone: bool = False) -> Function:
    """Operators that work along dimensions given by the arguments `names` and keep the others as they are."""

    def rule(node: fx.Node, states: States, size: int) -> Rule:
        x, state = _first(node, states)
        rank = len(_shape(x))
        dims = [_argument(node, name) for name in names]
        flat = [dim for given in dims for dim in ([given] if isinstance(given, int) else given)]
        if not flat:
            raise NotBatched(f"{node.target} works along all dimensions at once")
        _apart(node, state, flat, rank)
        below = sum(dim % rank < state.dim for dim in flat) if gone else 0
        moved = Batched(state.dim - below, state.inner)
        single = isinstance(node.meta["val"], torch.Tensor)
        return Rule(moved if single else (moved,) * len(node.meta["val"]))

    return rule


def _slice(node: fx.Node, states: States, size: int) -> Rule:
    x, state = _first(node, states)
    dim = _argument(node, "dim") % len(_shape(x))
    if dim == state.dim and _shape(x) != _shape(node):
        raise NotBatched(f"{node.target} takes a part of the batch")
    if dim == state.dim:
        return Rule(state, resize=lambda samples: {2: 0, 3: samples * state.inner})
    return Rule(state)


def _cat(node: fx.Node, states: States, size: int) -> Rule:
    rank = len(_shape(node))
    dim = _argument(node, "dim") % rank
    # An empty tensor of one dimension counts for nothing: caches of keys and values begin as such.
    given: Any = node.args[0]
    operands: list[fx.Node] = [operand for operand in given if _shape(operand) != (0,) or rank == 1]
    found = {state for operand in operands if (state := _batched(operand, states)) is not None}
    if len(found) != 1:
        raise NotBatched(f"{node.target} meets two batches that lie differently")
    (state,) = found
    _apart(node, state, [dim], rank)
    slices = {operand: state for operand in operands if _batched(operand, states) is None}
    return Rule(state, slices)


# -- sums along dimensions --------------------------------------------------------------------------------------------


def _reduction(node: fx.Node, states: States, size: int) -> Rule:
    x, state = _first(node, states)
    rank = len(_shape(x))
    given = _argument(node, "dim")
    dims = list(range(rank)) if given is None or given == [] else [given] if isinstance(given, int) else list(given)
    _apart(node, state, dims, rank)
    keeps = bool(_argument(node, "keepdim"))
    below = 0 if keeps else sum(dim % rank < state.dim for dim in dims)
    moved = Batched(state.dim - below, state.inner)
    single = isinstance(node.meta["val"], torch.Tensor)
    return Rule(moved if single else (moved,) * len(node.meta["val"]))


def _over_all(node: fx.Node, states: States, size: int) -> Rule:
    raise NotBatched(f"{node.target} reduces over the batch")


def _normalised(node: fx.Node, states: States, size: int) -> Rule:
    """Layer norm and RMS norm: over the last dimensions."""
    x, state = _first(node, states)
    if state.dim >= len(_shape(x)) - len(_argument(node, "normalized_shape")):
        raise NotBatched(f"{node.target} normalises over the batch")
    return Rule((state,) * len(tensors_of(node)))


def _group_norm(node: fx.Node, states: States, size: int) -> Rule:
    _, state = _first(node, states)
    if state.dim != 0:
        raise NotBatched(f"{node.target} with the batch in dimension {state.dim}")
    return Rule((state,) * len(tensors_of(node)), resize=lambda samples: {_place(node, "N"): samples * state.inner})


def _batch_norm(node: fx.Node, states: States, size: int) -> Rule:
    """In eval mode: element by element, with numbers for each channel."""
    _, state = _first(node, states)
    if state.dim == 1:
        raise NotBatched(f"{node.target} with the batch in the channels")
    unused = NotBatched("statistics that eval mode does not compute")
    return Rule((state, unused, unused))


def _trained_norm(node: fx.Node, states: States, size: int) -> Rule:
    """Over all dimensions but the channels; an instance norm has the samples there."""
    x, state = _first(node, states)
    if node.target is aten._native_batch_norm_legit.no_stats and state.dim == 1:
        of_channels = [operand for operand in node.all_input_nodes if operand is not x]
        moved = Batched(0, state.inner)
        return Rule((state, moved, moved), dict.fromkeys(of_channels, moved))
    raise NotBatched("a batch norm in training mode takes mean and variance over the whole batch")


# -- products ---------------------------------------------------------------------------------------------------------


def _product(left: Any, right: Any, states: States, size: int, node: fx.Node, lead: int) -> Rule:
    """Left (…, n, k) times right (…, k, m), with `lead` dimensions before."""
    one, other = _batched(left, states), _batched(right, states)
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
    if _batched(left, states) is None and _batched(right, states) is None:
        raise NotBatched(f"{node.target} with a batch in what is added only")
    rule = _product(left, right, states, size, node, 1 if node.target is aten.baddbmm.default else 0)
    state = rule.state
    assert isinstance(state, Batched) and isinstance(bias, fx.Node)
    shape, rank = _shape(bias), len(_shape(node))
    own, dim = _batched(bias, states), state.dim - (rank - len(shape))
    if own is not None and Batched(own.dim + rank - len(shape), own.inner) != state:
        raise NotBatched(f"{node.target} meets two batches that lie differently")
    if own is None and dim >= 0 and shape[dim] > 1:
        return Rule(state, {**rule.slices, bias: Batched(dim, state.inner)})
    return rule


def _convolution(node: fx.Node, states: States, size: int) -> Rule:
    x, state = _first(node, states)
    if state.dim != 0 or len(_shape(x)) != len(_shape(node.args[1])):  # type: ignore[arg-type]
        raise NotBatched(f"{node.target} with the batch in dimension {state.dim} of {len(_shape(x))}")
    return Rule(state)


def _attention(node: fx.Node, states: States, size: int) -> Rule:
    """softmax(QKᵀ)V over (batch, heads, tokens, width); what else the fused operators return is not followed."""
    query, key, value = node.args[:3]
    if _argument(node, "dropout_p") != 0.0:
        raise NotBatched(f"{node.target} draws random numbers for the whole batch")
    state = _batched(query, states)
    if state is None or state.dim != 0 or _batched(key, states) != state or _batched(value, states) != state:
        raise NotBatched(f"{node.target} meets queries, keys and values that lie differently along the batch")
    names = [entry.name for entry in node.target._schema.arguments]  # type: ignore[union-attr]
    mask = next((_argument(node, name) for name in ("attn_mask", "attn_bias") if name in names), None)
    slices = {}
    if isinstance(mask, fx.Node):
        rank, own = len(_shape(mask)), _batched(mask, states)
        if own is not None and (rank != 4 or own != state):
            raise NotBatched(f"{node.target} meets a mask that lies differently along the batch")
        if own is None and rank == 4 and _shape(mask)[0] > 1:
            slices[mask] = state
    single = isinstance(node.meta["val"], torch.Tensor)
    rest = NotBatched(f"another result of {node.target} than the attended values")
    return Rule(state if single else (state, *(rest for _ in node.meta["val"][1:])), slices)


# -- others -----------------------------------------------------------------------------------------------------------


def _spatial(node: fx.Node, states: States, size: int) -> Rule:
    """Pooling and resizing of the last two dimensions of (batch, channels, height, width)."""
    x, state = _first(node, states)
    if len(_shape(x)) != 4 or state.dim > 1:
        raise NotBatched(f"{node.target} with the batch in dimension {state.dim} of {len(_shape(x))}")
    single = isinstance(node.meta["val"], torch.Tensor)
    return Rule(state if single else (state,) * len(node.meta["val"]))


def _pad(node: fx.Node, states: States, size: int) -> Rule:
    x, state = _first(node, states)
    pad: Any = node.args[1]
    rank = len(_shape(x))
    _apart(node, state, [rank - 1 - index // 2 for index, amount in enumerate(pad) if amount], rank)
    return Rule(state)


def _triangle(node: fx.Node, states: States, size: int) -> Rule:
    x, state = _first(node, states)
    _apart(node, state, [-1, -2], len(_shape(x)))
    return Rule(state)


def _embedding(node: fx.Node, states: States, size: int) -> Rule:
    weight, indices = node.args[:2]
    state = _batched(indices, states)
    if state is None or _batched(weight, states) is not None:
        raise NotBatched("embedding with a table for each sample")
    return Rule(state)


def _gather(node: fx.Node, states: States, size: int) -> Rule:
    x, dim, index = node.args[:3]
    one, other = _batched(x, states), _batched(index, states)
    state = one or other
    assert state is not None and isinstance(x, fx.Node) and isinstance(index, fx.Node)
    _apart(node, state, [dim], len(_shape(x)))  # type: ignore[list-item]
    if (one and other and one != other) or _shape(x)[state.dim] != _shape(index)[state.dim]:
        raise NotBatched(f"{node.target} meets two batches that lie differently")
    return Rule(state, {operand: state for operand, own in ((x, one), (index, other)) if own is None})


def _index(node: fx.Node, states: States, size: int) -> Rule:
    """x[i, j, …] with an independent x and indices of its first dimensions."""
    x, indices = node.args[:2]
    given = [index for index in indices if index is not None]  # type: ignore[union-attr]
    if _batched(x, states) is not None or given != list(indices)[: len(given)]:  # type: ignore[arg-type]
        raise NotBatched(f"{node.target} picks entries out of the batch")
    rank = max(len(_shape(index)) for index in given)
    if any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in given):
        raise NotBatched(f"{node.target} with a mask has as many results as the mask has true entries")
    return _aligned(node, states, size, given, rank)


_ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default, aten.scaled_dot_product_attention.default,
)  # fmt: skip
_KINDS: tuple[tuple[Function, tuple[Any, ...]], ...] = (
    (_same, (
        aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default, aten.contiguous.default,
        aten.hardswish.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.lift_fresh_copy.default,
    )),
    (_check, (aten._assert_tensor_metadata.default,)),
    (pointwise, (aten.copy.default, aten.masked_fill.Tensor)),
    (_view, (aten.view.default, aten._unsafe_view.default, aten.reshape.default)),
    (_permute, (aten.permute.default,)),
    (_transpose, (aten.transpose.int, aten.t.default)),
    (_unsqueeze, (aten.unsqueeze.default,)),
    (_squeeze, (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)),
    (_expand, (aten.expand.default,)),
    (_repeat, (aten.repeat.default,)),
    (_along("dim", gone=True), (aten.select.int, aten.unbind.int)),
    (_along("dim"), (
        aten.split.Tensor, aten.split_with_sizes.default, aten._softmax.default, aten._log_softmax.default,
        aten.cumsum.default, aten.cumprod.default, aten.topk.default, aten.sort.default, aten.sort.stable,
        aten.glu.default, aten.index_select.default,
    )),
    (_along("dims"), (aten.flip.default, aten.roll.default)),
    (_slice, (aten.slice.Tensor,)),
    (_cat, (aten.cat.default,)),
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
        aten.upsample_nearest2d.default, aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default,
        aten.reflection_pad2d.default, aten.replication_pad2d.default,
        aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec,
    )),
    (_pad, (aten.constant_pad_nd.default,)),
    (_triangle, (aten.tril.default, aten.triu.default)),
    (_embedding, (aten.embedding.default,)),
    (_gather, (aten.gather.default,)),
    (_index, (aten.index.Tensor,)),
)  # fmt: skip
RULES: Mapping[Any, Function] = {target: function for function, targets in _KINDS for target in targets}
