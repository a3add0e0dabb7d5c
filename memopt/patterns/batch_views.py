"""What operators that move entries about do to the batch: views, slices, repetitions and concatenations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from memopt.patterns.batch import Batched, NotBatched, Rule
from memopt.patterns.batch_operands import Function, Kinds, States, apart, batched, first
from memopt.patterns.elements import shape
from memopt.program import argument

aten = torch.ops.aten


def _view(node: fx.Node, states: States, size: int) -> Rule:
    x, state = first(node, states)
    before, after = shape(x), shape(node)
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
    x, state = first(node, states)
    dims = [dim % len(shape(x)) for dim in argument(node, "dims")]
    return Rule(Batched(dims.index(state.dim), state.inner))


def _transpose(node: fx.Node, states: States, size: int) -> Rule:
    x, state = first(node, states)
    rank = len(shape(x))
    if rank < 2:
        return Rule(state)
    one, other = (0, 1) if node.target is aten.t.default else [argument(node, f"dim{i}") % rank for i in (0, 1)]
    return Rule(Batched({one: other, other: one}.get(state.dim, state.dim), state.inner))


def _unsqueeze(node: fx.Node, states: States, size: int) -> Rule:
    x, state = first(node, states)
    dim = argument(node, "dim") % (len(shape(x)) + 1)
    return Rule(Batched(state.dim + (dim <= state.dim), state.inner))


def _squeeze(node: fx.Node, states: States, size: int) -> Rule:
    x, state = first(node, states)
    sizes = shape(x)
    if len(node.args) > 1:
        given: Any = node.args[1]
        dims = [dim % len(sizes) for dim in ([given] if isinstance(given, int) else given)]
    else:  # a chunk of one sample must keep its batch
        raise NotBatched("squeeze() without dimensions would take the batch away where it is 1")
    gone = [dim for dim in dims if sizes[dim] == 1]
    apart(node, state, dims, len(sizes))
    return Rule(Batched(state.dim - sum(dim < state.dim for dim in gone), state.inner))


def _expand(node: fx.Node, states: States, size: int) -> Rule:
    x, state = first(node, states)
    after = shape(node)
    dim = state.dim + len(after) - len(shape(x))

    def resize(samples: int) -> dict[int, Any]:
        return {1: [*after[:dim], samples * state.inner, *after[dim + 1 :]]}

    return Rule(Batched(dim, state.inner), resize=resize)


def _repeat(node: fx.Node, states: States, size: int) -> Rule:
    x, state = first(node, states)
    repeats: Any = node.args[1]
    dim = state.dim + len(repeats) - len(shape(x))
    if repeats[dim] != 1:
        raise NotBatched("repeat makes copies of samples")
    return Rule(Batched(dim, state.inner))


def along(*names: str, gone: bool = False) -> Function:
    """Operators that work along dimensions given by the arguments `names` and keep the others as they are."""

    def rule(node: fx.Node, states: States, size: int) -> Rule:
        x, state = first(node, states)
        rank = len(shape(x))
        dims = [argument(node, name) for name in names]
        flat = [dim for given in dims for dim in ([given] if isinstance(given, int) else given)]
        if not flat:
            raise NotBatched(f"{node.target} works along all dimensions at once")
        apart(node, state, flat, rank)
        below = sum(dim % rank < state.dim for dim in flat) if gone else 0
        moved = Batched(state.dim - below, state.inner)
        single = isinstance(node.meta["val"], torch.Tensor)
        return Rule(moved if single else (moved,) * len(node.meta["val"]))

    return rule


def _slice(node: fx.Node, states: States, size: int) -> Rule:
    x, state = first(node, states)
    dim = argument(node, "dim") % len(shape(x))
    if dim == state.dim and shape(x) != shape(node):
        raise NotBatched(f"{node.target} takes a part of the batch")
    if dim == state.dim:
        return Rule(state, resize=lambda samples: {2: 0, 3: samples * state.inner})
    return Rule(state)


def _cat(node: fx.Node, states: States, size: int) -> Rule:
    rank = len(shape(node))
    dim = argument(node, "dim") % rank
    # An empty tensor of one dimension counts for nothing: caches of keys and values begin as such.
    given: Any = node.args[0]
    operands: list[fx.Node] = [operand for operand in given if shape(operand) != (0,) or rank == 1]
    found = {state for operand in operands if (state := batched(operand, states)) is not None}
    if len(found) != 1:
        raise NotBatched(f"{node.target} meets two batches that lie differently")
    (state,) = found
    apart(node, state, [dim], rank)
    slices = {operand: state for operand in operands if batched(operand, states) is None}
    return Rule(state, slices)


def _restrided(node: fx.Node, states: States, size: int) -> Rule:
    """The same entries with other strides where there is one entry only, as an average over an image leaves them.

    A chunk must lie as the whole does for that to hold; see `same_entries`, which is asked of every chunk.
    """
    _, state = first(node, states)
    if state.dim != 0 or not same_entries(node):
        raise NotBatched(f"{node.target} looks at memory otherwise than its operand does")
    after = shape(node)
    return Rule(state, resize=lambda samples: {1: [samples * state.inner, *after[1:]]})


def same_entries(node: fx.Node) -> bool:
    """Whether an `as_strided` shows what its operand does, but for strides of dimensions of one entry."""
    x: Any = node.args[0]
    value, result = x.meta["val"], node.meta["val"]
    strides = zip(result.shape, result.stride(), value.stride(), strict=True)
    return (
        value.shape == result.shape
        and argument(node, "storage_offset") is None
        and all(count == 1 or a == b for count, a, b in strides)
    )


VIEWS: Kinds = (
    (_view, (aten.view.default, aten._unsafe_view.default, aten.reshape.default)),
    (_permute, (aten.permute.default,)),
    (_transpose, (aten.transpose.int, aten.t.default)),
    (_unsqueeze, (aten.unsqueeze.default,)),
    (_squeeze, (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)),
    (_expand, (aten.expand.default,)),
    (_repeat, (aten.repeat.default,)),
    (_slice, (aten.slice.Tensor,)),
    (_cat, (aten.cat.default,)),
    (_restrided, (aten.as_strided.default,)),
    (along("dim", gone=True), (aten.select.int, aten.unbind.int)),
    (along("dims"), (aten.flip.default, aten.roll.default)),
)  # fmt: skip
