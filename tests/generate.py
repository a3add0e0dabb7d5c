"""Random recipes for hypothesis: each step is drawn to fit the values at hand, and is run as it is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch import Tensor

from tests.instructions import DTYPES, FLOATS, INPLACE, LEAVES, UNARY, Recipe
from tests.recipe_builder import Builder, broadcasts, broadcasts_to, is_float, is_number, name_of
from tests.recipe_layers import layer, product, reduce
from tests.recipe_views import VIEW_PARAMS

MAX_VALUES = 40
_SHAPES = [(3,), (2, 3), (4, 4), (2, 4, 4), (1, 4), (2, 1, 3), (2, 4, 4, 4), (1, 6), ()]
_PARAMS: dict[str, list[tuple[Any, ...]]] = {
    "gelu": [("none",), ("tanh",)],
    "hand_silu_scaled": [(1.0,), (1.702,)],
    "hand_gelu": [(math.sqrt(2.0),), (1.5,)],
    "hand_gelu_half_first": [(math.sqrt(0.5),), (0.7071067811865475,), (0.7,)],
    "hand_gelu_tanh": [(math.sqrt(2 / math.pi), 0.044715), (0.8, 0.044715), (math.sqrt(2 / math.pi), 0.05)],
    "hand_hardswish": [(3.0, 6.0), (3, 6), (3.0, 5.0), (2.0, 6.0)],
    "hand_hardswish_clamp": [(3.0, 6.0), (3.0, 5.0)],
    "hand_hardsigmoid": [(3.0, 6.0), (2.0, 6.0)],
    "clamp": [(-1.0, 1.0), (0.0, 6.0), (-0.5, 2.0), (1.0, -1.0), (0, 1), (0.0, None), (None, 0.5)],
    "clamp_min": [(0.0,), (-0.5,), (0.25,), (1,)],
    "clamp_max": [(6.0,), (0.5,), (-0.25,), (1,)],
}
# Results that a rewrite, or other strides, may round differently: nothing discrete is computed from them.
_ROUNDED_UNARY = {name for name in UNARY if name.startswith("hand_")}


# -- families of steps --------------------------------------------------------------------------------------------


def _leaf(b: Builder) -> None:
    kind = b.choose(["user", "parameter", "constant"])
    dtype = b.choose([*b.floats, *b.floats, "int64", "bool"])
    style: Any = 4 if dtype == "int64" else b.choose(["signed", "strided", "positive"])
    b.leaf(kind, b.choose(_SHAPES), dtype, style)


def _unary(b: Builder) -> None:
    x = b.pick(is_float)
    if x is not None:
        op = b.choose(list(UNARY))
        b.add(op, (x,), b.choose(_PARAMS.get(op, [()])), op in _ROUNDED_UNARY)


def _clamp_chain(b: Builder) -> None:
    x = b.pick(is_number)
    for _ in range(b.draw(st.integers(1, 3))):
        if x is None:
            return
        op = b.choose(["clamp", "clamp_min", "clamp_max", "relu", "relu6", "hardtanh"])
        x = b.add(op, (x,), b.choose(_PARAMS.get(op, [()])))


def _binary(b: Builder) -> None:
    x = b.pick(is_number)
    if x is None:
        return
    shape = b.values[x].shape
    y = b.pick(lambda v: is_number(v) and broadcasts(v.shape, shape))
    op = b.choose(["add", "sub", "mul", "maximum", "minimum", "div", "gate", "add_scaled", "add_scalar", "mul_scalar"])
    if op in ("add_scalar", "mul_scalar"):
        b.add(op, (x,), (b.choose([0, 1, 0.5, -2, 3.0]),))
    else:
        b.add(op, (x, y) if b.chance(2) else (y, x), (2,) if op == "add_scaled" else ())


def _rsub(b: Builder) -> None:
    x = b.pick(is_number)
    if x is not None:
        b.add("rsub", (x,), (b.choose([0, 1, 1.5]),))


def _select(b: Builder) -> None:
    mask = b.pick(lambda v: v.dtype == torch.bool)
    if mask is None:
        return
    op = b.choose(["where", "masked_fill", "logical_not", "logical_and"])
    x = b.pick(lambda v: is_number(v) and broadcasts(v.shape, b.values[mask].shape))
    if op == "logical_not":
        b.add(op, (mask,))
    elif op == "logical_and":
        other = b.pick(lambda v: v.dtype == torch.bool and broadcasts(v.shape, b.values[mask].shape))
        b.add(op, (mask, other))
    elif x is not None and op == "where":
        y = b.pick(lambda v: v.dtype == b.values[x].dtype and broadcasts(v.shape, b.values[mask].shape))
        b.add(op, (mask, x, y))
    elif x is not None:
        b.add(op, (x, mask), (b.choose([0, 1, -2]),))


def _join(b: Builder) -> None:
    x = b.pick(lambda v: v.dim() > 0)
    if x is None:
        return
    shape, dtype = b.values[x].shape, b.values[x].dtype
    many = [x, *(b.pick(lambda v: v.shape == shape and v.dtype == dtype) for _ in range(b.draw(st.integers(1, 2))))]
    b.add(b.choose(["cat", "stack"]), tuple(many), (b.dim(b.values[x]),))


def _discrete(b: Builder) -> None:
    x = b.pick(lambda v: is_number(v) and not b.is_rounded(v))
    if x is None:
        return
    op = b.choose(["less", "greater", "equal", "argmax", "topk", "max_dim", "sort"])
    value = b.values[x]
    if op in ("less", "equal"):
        y = b.pick(lambda v: is_number(v) and not b.is_rounded(v) and broadcasts(v.shape, value.shape))
        b.add(op, (x, y))
    elif op == "greater":
        b.add(op, (x,), (b.choose([0, 0.5, 1]),))
    elif value.dim() > 0:
        dim = b.dim(value)
        b.add(op, (x,), (min(2, value.shape[dim]), dim) if op == "topk" else (dim,))


def _cast(b: Builder) -> None:
    x = b.pick(lambda v: True)
    if x is None:
        return
    dtype = b.choose([*FLOATS, *FLOATS, "int64", "bool"])
    if dtype in FLOATS:
        if b.chance(4) and is_float(b.values[x]):
            b.add("there_and_back", (x,), (dtype, name_of(b.values[x])))
        else:
            b.add("to", (x,), (dtype,))
    elif not b.is_rounded(b.values[x]):
        b.add("to", (x,), (dtype,))


def _index(b: Builder) -> None:
    index = b.pick(lambda v: v.dtype == torch.int64 and v.numel() > 0 and bool((v >= 0).all()))
    if index is None:
        return
    ids = b.values[index]
    need = int(ids.max()) + 1
    if b.chance(2):
        b.add("embedding", (index, b.weight((need, 4), torch.empty(0, dtype=DTYPES[b.choose(b.floats)]))))
        return
    x = b.pick(lambda v: v.dim() > 0 and v.shape[0] >= need)
    if x is not None and ids.dim() == 1:
        b.add("index_select", (x, index), (0,))
    elif x is not None and ids.dim() == b.values[x].dim():
        b.add("gather", (x, index), (0,))


def _fresh(b: Builder) -> None:
    op = b.choose(["full", "arange", "zeros_like", "ones_like"])
    x = b.pick(is_number)
    if op == "full":
        b.add(op, (), (b.choose(_SHAPES), b.choose([0, 1, 0.5, -1.5]), b.choose(b.floats)))
    elif op == "arange":
        b.add(op, (), (b.choose([1, 3, 4]), b.choose([*b.floats, "int64"])))
    elif x is not None:
        b.add(op, (x,))


def _view(b: Builder) -> None:
    x = b.pick(lambda v: True)
    if x is None:
        return
    value = b.values[x]
    ops = ["view", "reshape", "flatten", "squeeze", "unsqueeze", "clone", "contiguous", "same_dtype", "eval_dropout"]
    if b.training:
        ops.append("detach")
    if value.dim() > 0:
        ops += ["slice", "narrow", "select", "expand", "flip", "pad", "repeat", "split", "unbind", "chunk"]
    if value.dim() > 1:
        ops += ["transpose", "permute", "transpose", "cancelling_permutes", "diagonal"]
    if value.dim() == 4:
        ops.append("channels_last")
    op = b.choose(ops)
    b.add(op, (x,), VIEW_PARAMS[op](b, value) if op in VIEW_PARAMS else ())


def _inplace(b: Builder) -> None:
    def writable(v: Tensor) -> bool:
        if b.training and is_float(v) and v.requires_grad and v.is_leaf:
            return False
        return v.untyped_storage()._cdata not in b.owned and torch._debug_has_internal_overlap(v) != 1

    x = b.pick(lambda v: is_number(v) and writable(v))
    if x is None:
        return
    value = b.values[x]
    op = b.choose(
        [name for name in INPLACE if name != "dropout_" or (b.random and is_float(value) and value.is_contiguous())]
    )
    y = b.pick(
        lambda v: (
            is_number(v) and v.dim() <= value.dim() and broadcasts_to(v.shape, value.shape) and not _in_part(v, value)
        )
    )
    if op in ("add_", "mul_", "copy_", "sub_scaled_"):
        if y is not None and (op != "copy_" or not is_float(b.values[y]) or is_float(value)):
            b.add(op, (x, y), (2,) if op == "sub_scaled_" else ())
    elif op == "masked_fill_":
        mask = b.pick(lambda v: v.dtype == torch.bool and broadcasts_to(v.shape, value.shape))
        if mask is not None:
            b.add(op, (x, mask), (b.choose([0, 1]),))
    elif op == "fill_row_":
        if value.dim():
            b.add(op, (x,), (0, b.choose([0, 1])))
    elif op == "dropout_":
        b.add(op, (x,), (0.5, name_of(value)), rounds=True)
    else:
        choices: dict[str, list[tuple[Any, ...]]] = {
            "add_scalar_": [(1,), (-2,)],
            "mul_scalar_": [(2,), (-1,)],
            "clamp_": [(-1, 1), (0, 6)],
            "fill_": [(0,), (2,)],
        }
        b.add(op, (x,), b.choose(choices.get(op, [()])))


def _in_part(read: Tensor, written: Tensor) -> bool:
    """Whether one shows other elements of the same memory than the other: what is read then depends on the order."""
    if read.untyped_storage()._cdata != written.untyped_storage()._cdata:
        return False
    places = [(v.shape, v.stride(), v.storage_offset()) for v in (read, written)]
    return places[0] != places[1]


def _random(b: Builder) -> None:
    x = b.pick(is_float)
    if x is not None:
        op = b.choose(["dropout", "dropout", "rand_like", "bernoulli"])
        dtype = name_of(b.values[x])
        b.add(op, (x,), {"dropout": (b.choose([0.5, 0.1]), dtype), "rand_like": (dtype,)}.get(op, (0.5, dtype)), True)


def _update_buffer(b: Builder) -> None:
    x = b.pick(lambda v: is_float(v) and v.numel() > 0)
    if x is not None:
        b.add("update_buffer_", (b.leaf("buffer", b.choose([(), (3,)])), x), rounds=True)


def _repeat(b: Builder) -> None:
    """An earlier step again, for common subexpressions that are none when something was written in between."""
    steps = [step for step in reversed(b.steps) if step.op not in LEAVES and step.op not in INPLACE]
    steps = [step for step in steps if not step.op.startswith(("batch_norm_train", "update_buffer_"))]
    if steps:
        step = b.choose(steps)
        b.add(step.op, step.operands, step.params, rounds=True)


_FAMILIES = [
    *[_unary, _view, _binary, product, layer] * 3,
    *[_inplace, reduce, _repeat] * 2,
    *[_clamp_chain, _rsub, _select, _join, _discrete, _cast, _index, _fresh, _random, _update_buffer, _leaf],
]


@st.composite
def recipes(draw: Callable[..., Any], training: bool = False, mean_steps: int = 12, random: bool = True) -> Recipe:
    """A random recipe of about `mean_steps` steps, and their leaves; in training, eager PyTorch can go backward."""
    b = Builder(draw, training, random)
    b.floats = [draw(st.sampled_from(["float32", "float32", "float32", "float64", "bfloat16"]))]
    with torch.set_grad_enabled(training), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        b.leaf("user", b.choose([*_SHAPES, *[(2, 4, 4, 4), (4, 4)] * 3]), b.floats[0], b.choose(["signed", "strided"]))
        if training:
            b.add("mul", (0, b.leaf("parameter", b.values[0].shape, b.floats[0])))
        # One draw per step says whether to stop, so that hypothesis can delete steps one by one.
        while len(b.values) < MAX_VALUES and draw(st.integers(0, mean_steps)):
            family = b.choose(_FAMILIES)
            if random or family is not _random:
                family(b)
        count = len(b.values)
        outputs = (count - 1, *draw(st.lists(st.integers(0, count - 1), max_size=3)))
        if training:
            outputs = _with_gradients(b, outputs)
    return Recipe(tuple(b.steps), tuple(outputs))


def _with_gradients(b: Builder, outputs: tuple[int, ...]) -> tuple[int, ...]:
    """The outputs and one that requires a gradient; a recipe whose backward eager PyTorch refuses is rejected.

    A tensor that backward needs was written in place, or a view that must not be, of which torch will not even say
    whether it requires a gradient.
    """
    try:
        outputs = (*outputs, next(i for i in reversed(range(len(b.values))) if b.values[i].requires_grad))
        found = [b.values[i] for i in outputs if b.values[i].requires_grad]
        leaves = [v for v in b.values if v.is_leaf and v.requires_grad]
        torch.autograd.grad(found, leaves, [torch.ones_like(v) for v in found], allow_unused=True)
    except RuntimeError:
        reject()
    return outputs
