"""A tiny language of tensor programs, a list of steps that eager PyTorch and every capture can run.

A recipe prints as Python code that builds it again, so that a failure can be kept as an explicit example.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "int64", "bool")}
FLOATS = ("float32", "float64", "bfloat16")
LEAVES = ("user", "parameter", "buffer", "constant")


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation. Values are numbered in order of creation; a step with several results makes several values."""

    op: str
    operands: tuple[int, ...] = ()
    params: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The steps, and the numbers of the values that are returned (repeats, aliases and leaves included)."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]


def _hand_gelu_tanh(x: Tensor, scale: float, cube: float) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(scale * (x + cube * x * x * x)))


def _cancelling_permutes(x: Tensor, order: tuple[int, ...]) -> Tensor:
    return x.permute(order).permute([order.index(i) for i in range(x.dim())])


def _softmax_like(x: Tensor, dim: int) -> Tensor:
    shifted = (x - x.amax(dim, keepdim=True)).exp()
    return shifted / shifted.sum(dim, keepdim=True)


# Element-wise, continuous, bounded growth; the hand-written forms carry their constants so that near misses occur too.
UNARY: dict[str, Callable[..., Any]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": lambda x, approximate: F.gelu(x, approximate=approximate),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "softplus": F.softplus,
    "neg": torch.neg,
    "abs": torch.abs,
    "sin": torch.sin,
    "exp": lambda x: torch.exp(-x.abs()),
    "sqrt": lambda x: torch.sqrt(x.abs() + 0.25),
    "rsqrt": lambda x: torch.rsqrt(x * x + 0.5),
    "log1p": lambda x: torch.log1p(x.abs()),
    "hand_relu": lambda x: x.clamp_min(0),
    "hand_relu_max": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "hand_silu": lambda x: x * torch.sigmoid(x),
    "hand_silu_swapped": lambda x: torch.sigmoid(x) * x,
    "hand_silu_div": lambda x: x / (1 + torch.exp(-x)),
    "hand_silu_scaled": lambda x, scale: x * torch.sigmoid(scale * x),
    "hand_gelu": lambda x, scale: x * 0.5 * (1.0 + torch.erf(x / scale)),
    "hand_gelu_half_first": lambda x, scale: 0.5 * x * (torch.erf(x * scale) + 1),
    "hand_gelu_tanh": _hand_gelu_tanh,
    "hand_hardswish": lambda x, shift, scale: x * F.relu6(x + shift) / scale,
    "hand_hardswish_clamp": lambda x, shift, scale: x * ((x + shift).clamp(0, scale) / scale),
    "hand_hardsigmoid": lambda x, shift, scale: F.relu6(x + shift) / scale,
    "clamp": torch.clamp,
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
}

VIEWS: dict[str, Callable[..., Any]] = {
    "view": lambda x, shape: x.view(shape),
    "flatten": lambda x: x.flatten(),
    "transpose": lambda x, a, b: x.transpose(a, b),
    "permute": lambda x, order: x.permute(order),
    "slice": lambda x, dim, start, stop, step: x[(slice(None),) * dim + (slice(start, stop, step),)],
    "narrow": lambda x, dim, start, length: x.narrow(dim, start, length),
    "select": lambda x, dim, index: x.select(dim, index),
    "squeeze": lambda x: x.squeeze(),
    "unsqueeze": lambda x, dim: x.unsqueeze(dim),
    "expand": lambda x, shape: x.expand(shape),
    "diagonal": lambda x: x.diagonal(),
    "detach": lambda x: x.detach(),
    "contiguous": lambda x: x.contiguous(),
    "same_dtype": lambda x: x.to(x.dtype),
    "cancelling_permutes": _cancelling_permutes,
    "eval_dropout": lambda x: F.dropout(x, 0.5, training=False),
    "split": lambda x, size, dim: x.split(size, dim),
    "unbind": lambda x, dim: x.unbind(dim),
    "chunk": lambda x, chunks, dim: x.chunk(chunks, dim),
}

# In-place operations: the first operand is written, and the result is that operand.
INPLACE: dict[str, Callable[..., Any]] = {
    "add_": lambda x, y: x.add_(y),
    "sub_scaled_": lambda x, y, alpha: x.sub_(y, alpha=alpha),
    "mul_": lambda x, y: x.mul_(y),
    "add_scalar_": lambda x, value: x.add_(value),
    "mul_scalar_": lambda x, value: x.mul_(value),
    "relu_": lambda x: x.relu_(),
    "tanh_": lambda x: x.tanh_(),
    "clamp_": lambda x, low, high: x.clamp_(low, high),
    "zero_": lambda x: x.zero_(),
    "fill_": lambda x, value: x.fill_(value),
    "copy_": lambda x, y: x.copy_(y),
    "masked_fill_": lambda x, mask, value: x.masked_fill_(mask, value),
    "fill_row_": lambda x, index, value: (x.select(0, index).fill_(value), x)[1],
    "silu_": lambda x: F.silu(x, inplace=True),
    "dropout_": lambda x, p, dtype: F.dropout(x, p, training=True, inplace=True),
}

# Draws go in order of memory, which captures may choose: random steps read contiguous tensors only.
RANDOM: dict[str, Callable[..., Any]] = {
    "dropout": lambda x, p, dtype: F.dropout(x.contiguous(), p, training=True),
    "rand_like": lambda x, dtype: torch.rand_like(x.contiguous(), dtype=DTYPES[dtype]),
    "bernoulli": lambda x, p, dtype: x * torch.bernoulli(torch.full(x.shape, p, dtype=x.dtype)),
}

GENERAL: dict[str, Callable[..., Any]] = {
    # joins
    "add": torch.add,
    "add_scaled": lambda x, y, alpha: torch.add(x, y, alpha=alpha),
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + 0.5),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "add_scalar": torch.add,
    "mul_scalar": torch.mul,
    "rsub": lambda x, value: value - x,
    "gate": lambda x, y: x * torch.sigmoid(y),
    "where": torch.where,
    "masked_fill": lambda x, mask, value: x.masked_fill(mask, value),
    "cat": lambda *args: torch.cat(args[:-1], args[-1]),
    "stack": lambda *args: torch.stack(args[:-1], args[-1]),
    # discrete
    "less": torch.lt,
    "greater": lambda x, value: x > value,
    "equal": torch.eq,
    "logical_not": torch.logical_not,
    "logical_and": torch.logical_and,
    "argmax": lambda x, dim: x.argmax(dim),
    "to": lambda x, dtype: x.to(DTYPES[dtype]),
    "topk": lambda x, k, dim: tuple(torch.topk(x, k, dim)),
    "max_dim": lambda x, dim: tuple(x.max(dim)),
    "sort": lambda x, dim: tuple(x.sort(stable=True, dim=dim)),
    "index_select": lambda x, index, dim: x.index_select(dim, index),
    "gather": lambda x, index, dim: x.gather(dim, index),
    "embedding": lambda index, weight: F.embedding(index, weight),
    # fresh tensors that depend on no input
    "full": lambda shape, value, dtype: torch.full(shape, value, dtype=DTYPES[dtype]),
    "arange": lambda stop, dtype: torch.arange(stop, dtype=DTYPES[dtype]),
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    # copies
    "clone": torch.clone,
    "reshape": lambda x, shape: x.reshape(shape),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "there_and_back": lambda x, dtype, back: x.to(DTYPES[dtype]).to(DTYPES[back]),
    "flip": lambda x, dim: x.flip(dim),
    "pad": lambda x, before, after, value: F.pad(x, (before, after), value=value),
    "repeat": lambda x, times: x.repeat(times),
    # reductions
    "sum": lambda x, dim, keepdim: x.sum(dim, keepdim),
    "mean": lambda x, dim, keepdim: x.mean(dim, keepdim),
    "amax": lambda x, dim, keepdim: x.amax(dim, keepdim),
    "var": lambda x, dim, keepdim: x.var(dim, correction=0, keepdim=keepdim),
    "sum_all": lambda x: x.sum() / max(1, x.numel()),
    "cumsum": lambda x, dim: x.cumsum(dim) / x.shape[dim],
    "softmax": lambda x, dim: x.softmax(dim),
    "log_softmax": lambda x, dim: x.log_softmax(dim),
    "hand_softmax": _softmax_like,
    "logsumexp": lambda x, dim: x.logsumexp(dim),
    # matrix products
    "mm": lambda x, y: torch.mm(x, y),
    "mm_add": lambda x, y, z: torch.mm(x, y) + z,
    "add_mm": lambda x, y, z: z + torch.mm(x, y),
    "mm_sub": lambda x, y, z: torch.mm(x, y) - z,
    "addmm": lambda x, y, z, beta, alpha: torch.addmm(z, x, y, beta=beta, alpha=alpha),
    "bmm": torch.bmm,
    "bmm_add": lambda x, y, z: torch.bmm(x, y) + z,
    "baddbmm": lambda x, y, z: torch.baddbmm(z, x, y),
    "matmul": torch.matmul,
    "linear": lambda x, weight: F.linear(x, weight),
    "linear_bias": lambda x, weight, bias: F.linear(x, weight, bias),
    "attention": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    # layers
    "conv1d": lambda x, w, stride, padding, groups: F.conv1d(x, w, None, stride, padding, 1, groups),
    "conv2d": lambda x, w, stride, padding, groups: F.conv2d(x, w, None, stride, padding, 1, groups),
    "conv2d_bias": lambda x, w, b, stride, padding, groups: F.conv2d(x, w, b, stride, padding, 1, groups),
    "conv_transpose2d": lambda x, w, b, stride, groups: F.conv_transpose2d(x, w, b, stride, 0, 0, groups),
    "batch_norm": lambda x, mean, var, weight, bias: F.batch_norm(x, mean, var, weight, bias, False, 0.1, 1e-3),
    "batch_norm_plain": lambda x, mean, var: F.batch_norm(x, mean, var, None, None, False, 0.1, 1e-3),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "layer_norm_affine": lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias),
    "group_norm": lambda x, groups: F.group_norm(x, groups),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "global_pool": lambda x: F.adaptive_avg_pool2d(x, 1),
    # state: the only steps that write a leaf
    "update_buffer_": lambda buffer, x: buffer.mul_(0.9).add_(x.detach().float().mean(), alpha=0.1),
    "batch_norm_train": lambda x, mean, var, weight, bias: F.batch_norm(x, mean, var, weight, bias, True, 0.1, 1e-3),
}

OPERATIONS = {**UNARY, **VIEWS, **INPLACE, **RANDOM, **GENERAL}


def _same_mask(x: Tensor, dtype: str, p: float) -> Tensor:
    """The mask that dropout of a tensor of that dtype draws: draws may depend on the dtype."""
    return F.dropout(torch.ones(x.shape, dtype=DTYPES[dtype]), p, training=True).to(x.dtype)


# What the float64 reference does instead: the same draws, at the dtype that eager draws in.
REFERENCE: dict[str, Callable[..., Any]] = {
    "dropout": lambda x, p, dtype: x.contiguous() * _same_mask(x, dtype, p),
    "dropout_": lambda x, p, dtype: x.mul_(_same_mask(x, dtype, p)),
    "rand_like": lambda x, dtype: torch.rand(x.shape, dtype=DTYPES[dtype]).double(),
    "bernoulli": lambda x, p, dtype: x * torch.bernoulli(torch.full(x.shape, p, dtype=DTYPES[dtype])).double(),
    "update_buffer_": lambda buffer, x: buffer.mul_(0.9).add_(x.detach().mean(), alpha=0.1),
}


def leaf_steps(recipe: Recipe) -> list[Step]:
    """The steps that are leaves, in order."""
    return [step for step in recipe.steps if step.op in LEAVES]


def leaf_value(step: Step) -> Tensor:
    """The leaf's tensor, the same at every call. `style` is an exclusive upper bound (int64) or a name."""
    shape, dtype, style, seed = step.params
    generator = torch.Generator().manual_seed(seed)
    if dtype == "bool":
        return torch.rand(shape, generator=generator) < 0.5
    if dtype == "int64":
        return torch.randint(0, style, shape, generator=generator)
    order = shape[::-1] if style == "strided" else shape
    value = torch.rand(order, generator=generator, dtype=torch.float64)
    if style == "positive":
        value = value + 0.5
    elif style == "weight":
        value = (value - 0.5) * (3 / math.sqrt(max(1, math.prod(shape[1:]))))
    else:
        value = value * 4 - 2
    if style == "strided":
        value = value.permute(tuple(reversed(range(len(shape)))))
    return value.to(DTYPES[dtype])


def leaves_of(recipe: Recipe) -> list[Tensor]:
    """Fresh leaf tensors, in order."""
    return [leaf_value(step) for step in leaf_steps(recipe)]


def execute(recipe: Recipe, leaves: Sequence[Tensor], trace: list[Tensor] | None = None) -> list[Any]:
    """Run the steps on the leaves and return every value; `trace` gets copies of what each was when it was made."""
    values: list[Any] = []
    for _, results in _stepwise(recipe, leaves):
        values.extend(results)
        if trace is not None:
            trace.extend(value.detach().clone() for value in results)
    return values


def _stepwise(recipe: Recipe, leaves: Sequence[Tensor]) -> Iterator[tuple[Step, Sequence[Any]]]:
    """Run the steps on the leaves, each with its results."""
    values: list[Any] = []
    remaining = iter(leaves)
    for step in recipe.steps:
        result = next(remaining) if step.op in LEAVES else apply_step(step, values)
        results = result if isinstance(result, (tuple, list)) else (result,)
        values.extend(results)
        yield step, results


def apply_step(step: Step, values: Sequence[Any]) -> Any:
    """The result (or results) of one step that is no leaf."""
    return OPERATIONS[step.op](*(values[i] for i in step.operands), *step.params)


_RANDOM = ("dropout", "dropout_", "rand_like", "bernoulli")
_READ_NO_VALUES = ("zeros_like", "ones_like")


def draws_in_vain(recipe: Recipe, leaves: Sequence[Tensor]) -> bool:
    """Whether random numbers may be drawn that no output depends on, what in-place steps hand on by memory left out.

    Captures of torch's own leave such draws out, and the draws after them then differ from eager's.
    """
    made = [(step, len(results)) for step, results in _stepwise(recipe, leaves)]
    end = sum(count for _, count in made)
    needed = set(recipe.outputs)
    for step, count in reversed(made):
        end -= count
        if needed.isdisjoint(range(end, end + count)):
            if step.op in _RANDOM:
                return True
        elif step.op not in _READ_NO_VALUES:
            needed.update(step.operands)
    return False


class RecipeModule(torch.nn.Module):
    """The recipe as a module: its parameters, buffers and constants are attributes, its user leaves are arguments."""

    def __init__(self, recipe: Recipe, trainable: bool = False) -> None:
        super().__init__()
        self.recipe = recipe
        self.names: list[str | None] = []
        self.user: list[Tensor] = []
        for index, step in enumerate(leaf_steps(recipe)):
            value, name = leaf_value(step), f"{step.op}{index}"
            if step.op == "user":
                self.user.append(value)
                name = None
            elif step.op == "parameter":
                grad = trainable and value.is_floating_point()
                self.register_parameter(name, torch.nn.Parameter(value, requires_grad=grad))
            elif step.op == "buffer":
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
            self.names.append(name)

    def forward(self, *user: Tensor) -> tuple[Any, ...]:
        remaining = iter(user)
        leaves = [next(remaining) if name is None else getattr(self, name) for name in self.names]
        values = execute(self.recipe, leaves)
        return tuple(values[i] for i in self.recipe.outputs)
