"""Attention spelled out, and what FuseAttention makes of it, beside float64."""

import math

import torch
from torch.utils import _pytree as pytree

from memopt.passes.eliminate_copies import EliminateCopies
from memopt.passes.eliminate_dead import EliminateDead
from memopt.passes.fold_constants import FoldConstants
from memopt.passes.fuse_attention import FuseAttention
from tests.support import Apply, apply, capture, run, targets

FUSED = "aten._scaled_dot_product_flash_attention_for_cpu.default"
INF = float("inf")
B, H, L, D = 2, 4, 18, 8


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def heads(dtype=torch.float32, queries=L, keys=L):
    return [normal(B, H, n, D, dtype=dtype, seed=i) for i, n in enumerate((queries, keys, keys))]


def fused(function, *args, model=None, folded=True, factor=4.0):
    """The result of the pass; the float64 error must stay within `factor` times the one by hand."""
    module = Apply(function) if model is None else model
    program = capture(module, *args)
    if folded:
        program = FoldConstants().run(EliminateCopies().run(program).program).program
    result = apply(FuseAttention(), program)
    wide = [arg.double() if arg.is_floating_point() else arg for arg in args]
    with torch.no_grad():
        before, after = run(program, *args), run(result.program, *args)
        exact = pytree.tree_leaves(module.double()(*wide))
    for a, b, r in zip(before, after, exact, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a.isnan(), b.isnan())
        floor = 8 * torch.finfo(a.dtype).eps * float(r.nan_to_num().abs().max())
        error, allowed = (float((x.double() - r).nan_to_num().abs().max()) for x in (b, a))
        assert error <= factor * allowed + floor
    return result


def names(result):
    return targets(EliminateDead().run(result.program).program)


def operator(result):
    (node,) = [node for node in result.program.calls if str(node.target) == FUSED]
    return node


def scaled(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), -1) @ v


def masked(mask_of):
    """Attention with what `mask_of(scores, *more)` makes of the scores."""
    return lambda q, k, v, *more: mask_of(q @ k.mT / 3, *more).softmax(-1) @ v


def padding(shown=12):
    mask = torch.ones(B, 1, 1, L, dtype=torch.bool)
    mask[1, ..., shown:] = False
    return mask


LOW = torch.finfo(torch.float32).min


def tril(number=0.0):
    return torch.full((L, L), number).triu(1)


def refusals(function, *args):
    program = capture(Apply(function), *args)
    result = apply(FuseAttention(), program)
    assert result.program is program
    return [refusal.reason for refusal in result.refusals]
