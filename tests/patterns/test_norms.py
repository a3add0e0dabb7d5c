"""Normalisations written by hand, recognised."""

import pytest
import torch

from memopt.graph.rewrite import Refused
from memopt.patterns.norms import norm_of
from tests.support import Apply, capture

X, W, B = torch.randn(2, 3, 8), torch.randn(8), torch.randn(8)


def norms(function, *args):
    program = capture(Apply(function), *args)
    return [found for node in program.calls if (found := norm_of(program, node)) is not None]


def layer_norm(x, w=None, b=None, eps=1e-5, dim=-1, correction=0):
    mean = x.mean(dim, keepdim=True)
    y = (x - mean) / torch.sqrt(x.var(dim, correction=correction, keepdim=True) + eps)
    y = y if w is None else y * w
    return y if b is None else y + b


def test_what_is_normalised_and_what_follows_of_it():
    (found,) = norms(layer_norm, X, W, B)
    assert (found.centred, found.sizes, found.eps) == (True, (8,), 1e-5)
    assert found.weight is not None and found.bias is not None and found.result is found.nodes[-1]
    (found,) = norms(lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 0.5)), X, W)
    assert (found.centred, found.sizes, found.eps) == (False, (3, 8), 0.5) and found.bias is None


def test_other_quotients_are_none():
    assert norms(lambda x: x / torch.sqrt(x.abs().sum(-1, keepdim=True) + 1.0), X) == []
    assert norms(lambda x: x * 2 / torch.sqrt(x * x + 1.0), X) == []


@pytest.mark.parametrize("options", [{"dim": 1}, {"correction": 1}], ids=["not the last dimension", "unbiased"])
def test_a_normalisation_of_another_kind_is_refused(options):
    with pytest.raises(Refused):
        norms(lambda x: layer_norm(x, **options), X)


def test_one_whose_statistics_are_read_elsewhere_is_refused():
    def both(x):
        mean = x.mean(-1, keepdim=True)
        centred = x - mean
        variance = centred.pow(2).mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + 1e-5), variance * 2

    with pytest.raises(Refused):
        norms(both, X)
