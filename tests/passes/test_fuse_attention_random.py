"""FuseAttention on random spellings: shapes, dtypes, steps before the softmax, masks of any broadcast shape."""

import random

import pytest
import torch

from tests.passes.test_fuse_attention import INF, fused


def spelling(seed):
    """A random attention by hand, as a function and its arguments."""
    pick = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = pick.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    lead = pick.choice([(), (3,), (2, 3), (1, 2), (2, 1), (2, 2, 2)])
    queries, width = pick.choice([1, 5, 18, 33]), pick.choice([4, 8])
    keys = pick.choice([max(queries, 16), 17, 40])

    def normal(*sizes):
        return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = normal(*lead, queries, width), normal(*lead, keys, width), normal(*lead, keys, width)
    low = torch.finfo(dtype).min
    steps, masks = [], []
    for _ in range(pick.randint(0, 3)):
        kind = pick.choice(["scale", "add", "subtract", "show", "hide", "widen", "triangle"])
        sizes = [size if pick.random() < 0.6 else 1 for size in (*lead, queries, keys)]
        sizes = sizes[min(pick.choice([0, 0, 1, 2]), len(sizes) - 2) :]
        if kind in ("add", "subtract"):
            mask = normal(*sizes)
            if pick.random() < 0.3:
                number = pick.choice([-INF, low / 2]) * (1 if kind == "add" else -1)
                mask = mask.masked_fill(torch.rand(mask.shape, generator=generator) < 0.3, number)
            masks.append(mask)
        elif kind in ("show", "hide"):
            masks.append(torch.rand(sizes, generator=generator) < pick.choice([0.0, 0.3, 0.9]))
        number = {"scale": pick.choice([0.5, 3.0]), "triangle": pick.choice([-INF, -1e9, -1e4])}
        steps.append((kind, len(masks) - 1, number.get(kind, pick.choice([-INF, low, max(low, -1e9)])), pick.random()))
    before, after = pick.choice([None, 0.5]), pick.randint(0, 2)

    def function(q, k, v, *masks):
        scores = (q if before is None else q * before) @ k.transpose(-2, -1)
        for kind, index, number, turn in steps:
            if kind == "scale":
                scores = scores * number if turn < 0.5 else scores / number
            elif kind == "add":
                scores = scores + masks[index] if turn < 0.5 else masks[index] + scores
            elif kind == "subtract":
                scores = scores - masks[index]
            elif kind == "show":
                scores = torch.where(masks[index], scores, torch.tensor(number, dtype=scores.dtype))
            elif kind == "hide":
                scores = scores.masked_fill(masks[index], number)
            elif kind == "widen":
                scores = scores.float() if scores.dtype != torch.float64 else scores
            else:
                later = torch.ones(queries, keys, dtype=torch.bool).triu(1 + int(3 * turn))
                scores = scores + torch.zeros(queries, keys).masked_fill(later, number).to(scores.dtype)
        out = scores.softmax(-1).to(v.dtype) @ v
        return out if after < 2 or not lead else out.transpose(-2, -3).contiguous().relu()

    return function, (q, k, v, *masks)


@pytest.mark.parametrize("chunk", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 9))])
def test_random_spellings_are_right_or_refused(chunk):
    outcomes = set()
    for seed in range(25 * chunk, 25 * chunk + 25):
        function, args = spelling(seed)
        result = fused(function, *args)
        assert result.changes or result.refusals
        outcomes.add(bool(result.changes))
    assert outcomes == {True, False}
