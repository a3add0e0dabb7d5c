"""FuseAttention: masks and biases, causal ones, and rows that are hidden wholly."""

import pytest
import torch
from torch import nn

from tests.passes.attention import (
    FUSED,
    INF,
    LOW,
    B,
    H,
    L,
    fused,
    heads,
    masked,
    names,
    normal,
    operator,
    padding,
    refusals,
)
from tests.support import Apply, run


@pytest.mark.parametrize(
    "function",
    [
        lambda s, m: s + torch.where(m, 0.0, LOW),
        lambda s, m: torch.where(m, 0.0, LOW) + s,
        lambda s, m: s - torch.where(m, 0.0, -LOW),
        lambda s, m: s + (1.0 - m.float()) * LOW,
        lambda s, m: s + (~m).float().masked_fill(~m, -1e4),
        lambda s, m: s.masked_fill(~m, LOW),
        lambda s, m: s.masked_fill(m.logical_not(), torch.tensor(LOW)),
        lambda s, m: torch.where(m, s, torch.tensor(LOW)),
        lambda s, m: torch.where(m, s, torch.full([], LOW)),
        lambda s, m: torch.where(~m, LOW, s),
        lambda s, m: (s * 3 + torch.where(m, 0.0, -1e4)) / 3,
        lambda s, m: (s + torch.where(m, 0.0, -1e5)).masked_fill(~m, LOW),
        lambda s, m: (s.flatten(0, 1) + torch.where(m, 0.0, LOW).expand(B, H, 1, L).flatten(0, 1)).view(B, H, L, L),
    ],
)
def test_finite_masks(function):
    result = fused(masked(function), *heads(), padding())
    assert names(result).count(FUSED) == 1
    assert "aten.amax.default" not in names(result)  # finite: no row can be NaN
    wholly = padding()
    wholly[0] = False
    fused(masked(function), *heads(), wholly)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, m: s + torch.where(m, 0.0, -INF),
        lambda s, m: s.masked_fill(~m, -INF),
        lambda s, m: torch.where(m, s, torch.tensor(-INF)),
        lambda s, m: s + m.float().log(),
    ],
)
def test_rows_that_may_be_hidden_wholly_stay_nan(function):
    result = fused(masked(function), *heads(), padding())
    assert names(result).count("aten.amax.default") == 1
    wholly = padding()
    wholly[0] = False
    assert run(result.program, *heads(), wholly)[0].isnan().all((1, 2, 3)).tolist() == [True, False]
    fused(masked(function), *heads(), wholly)


def test_a_mask_of_the_callers():
    result = fused(masked(lambda s, m: s + m), *heads(), normal(B, 1, L, L))
    assert names(result).count("aten.amax.default") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masks_in_half_precision(dtype):
    def function(q, k, v, m):
        scores = q @ k.mT / 3 + torch.where(m, 0.0, torch.finfo(dtype).min).to(q.dtype)
        return scores.softmax(-1, dtype=torch.float32 if q.dtype == dtype else None).to(v.dtype) @ v

    if dtype is torch.float16:  # -65504 leaves nothing of a score there, so a hidden row is the mean of all values
        assert "float16 rounds its scores away" in refusals(function, *heads(dtype), padding())[0]
    else:
        assert FUSED in names(fused(function, *heads(dtype), padding()))

    def in_float32(q, k, v, m):
        return ((q @ k.mT).float() / 3 + torch.where(m, 0.0, -1e4)).softmax(-1).to(v.dtype) @ v

    assert FUSED in names(fused(in_float32, *heads(dtype), padding()))


@pytest.mark.parametrize(
    "function",
    [
        lambda s: s.masked_fill(torch.ones(L, L).tril() == 0, -INF),
        lambda s: s.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), -1e9),
        lambda s: s + torch.full((L, L), -INF).triu(1),
        lambda s: torch.where(torch.arange(L)[:, None] >= torch.arange(L), s, torch.tensor(LOW)),
        lambda s: s + torch.where(torch.ones(B, 1, L, L, dtype=torch.bool).tril(), 0.0, LOW),
    ],
)
@pytest.mark.parametrize("folded", [False, True])
def test_causal_masks_are_recognised(function, folded):
    result = fused(masked(function), *heads(), folded=folded)
    assert operator(result).args[3:] == (0.0, True)
    assert "attn_mask" not in operator(result).kwargs
    assert result.program.baked == frozenset()
    assert "aten.triu.default" not in names(result)


def test_a_number_that_rounds_up_in_half_precision_still_hides():
    def function(q, k, v):
        low = torch.tensor(-1e9, dtype=torch.bfloat16).to(q.dtype)
        return torch.where(torch.ones(L, L, dtype=torch.bool).tril(), q @ k.mT / 3, low).softmax(-1) @ v

    assert operator(fused(function, *heads(torch.bfloat16))).args[3:] == (0.0, True)


def test_a_causal_buffer_is_watched():
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("bias", torch.ones(1, 1, L, L, dtype=torch.bool).tril())

        def forward(self, q, k, v):
            return masked(lambda s: torch.where(self.bias[:, :, :L, :L], s, torch.tensor(-INF)))(q, k, v)

    result = fused(None, *heads(), model=Causal())
    assert operator(result).args[3:] == (0.0, True)
    assert result.program.baked == {"b_bias"}


@pytest.mark.parametrize(
    "mask",
    [
        torch.full((L, L), -INF).triu(2),
        torch.full((L, L), -INF).tril(-1),
        torch.full((L, L), -1.0).triu(1),
        torch.full((L, L), -INF).triu(1) + 1,
    ],
)
def test_what_is_not_causal_stays_a_mask(mask):
    result = fused(masked(lambda s: s + mask), *heads())
    assert operator(result).kwargs["attn_mask"].meta["val"].shape == (1, 1, L, L)
    assert "aten.amax.default" not in names(result)


def test_a_causal_mask_over_more_keys_than_queries_stays_a_mask():
    mask = torch.full((4, L), -INF).triu(1 + L - 4)
    assert "attn_mask" in operator(fused(masked(lambda s: s + mask), *heads(queries=4))).kwargs


def test_a_mask_that_does_nothing_goes():
    result = fused(masked(lambda s: s + torch.zeros(L, L)), *heads())
    assert operator(result).kwargs == {"scale": 1 / 3}


def test_masks_are_made_once():
    def function(q, k, v, m):
        mask = torch.where(m, 0.0, -INF)
        first = (q @ k.mT / 3 + mask).softmax(-1) @ v
        return (first @ k.mT / 3 + mask).softmax(-1) @ v

    assert names(fused(function, *heads(), padding())).count("aten.amax.default") == 1


def test_a_bias_of_every_head_is_added_up_with_a_mask():
    def function(q, k, v, m):
        bias = torch.arange(H)[:, None, None] * torch.arange(L)[None, None] * q.new_tensor(-0.1)
        scores = torch.baddbmm(bias.repeat(B, 1, 1), q.flatten(0, 1), k.flatten(0, 1).mT, beta=2.0, alpha=0.3)
        return (scores.view(B, H, L, L) + torch.where(m, 0.0, LOW)).softmax(-1) @ v

    result = fused(function, *heads(), padding())
    assert operator(result).kwargs["attn_mask"].meta["val"].shape == (B, H, 1, L)


def test_a_learned_bias_is_watched():
    table = nn.Embedding(7, H)

    def function(q, k, v):
        distance = (torch.arange(L)[:, None] - torch.arange(L)).clamp(-3, 3) + 3
        return ((q @ k.mT) + table(distance).permute(2, 0, 1)[None]).softmax(-1) @ v

    result = fused(function, *heads(), model=Apply(function, table=table), folded=False)
    assert result.program.baked == {"p_table_weight"}
    assert operator(result).kwargs["attn_mask"].meta["val"].is_contiguous()
