"""The product and the sum of an evaluated batch norm."""

import pytest
import torch
from torch import fx

from memopt.patterns.batch_norm import scale_and_shift

NORM = torch.ops.aten._native_batch_norm_legit_no_training.default


def norm_of(gamma=True, beta=True, eps=0.25):
    graph = fx.Graph()
    x, *vectors = (graph.placeholder(name) for name in ("x", "gamma", "beta", "mean", "variance"))
    given = [vectors[0] if gamma else None, vectors[1] if beta else None, *vectors[2:]]
    return graph.call_function(NORM, (x, *given, 0.1, eps))


@pytest.mark.parametrize("gamma", [False, True])
@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_they_are_what_the_operator_computes(gamma, beta, count):
    names = ("gamma", "beta", "mean", "variance")
    values = {name: torch.rand(3, dtype=torch.float64) for name in names}
    added = [torch.rand(3, dtype=torch.float64) for _ in range(count)]
    asked = []

    def read(node):
        asked.append(node.name)
        return values[node.name]

    node = norm_of(gamma, beta)
    scale, shift = scale_and_shift(node, read, added)
    x = torch.randn(4, 3, dtype=torch.float64)
    operands = [None if item is None else values[item.name] for item in node.args[1:5]]
    expected = NORM(x + sum(added), *operands, *node.args[5:])[0]
    assert (scale.dtype, scale.shape, shift.shape) == (torch.float64, (3,), (3,))
    torch.testing.assert_close(scale * x + shift, expected)
    assert sorted(asked) == sorted(item.name for item in node.args[1:5] if item is not None)


def test_epsilon_counts():
    values = {"gamma": 3.0, "beta": 0.0, "mean": 1.0, "variance": 2.0}
    scale, shift = scale_and_shift(norm_of(eps=0.25), lambda node: torch.full((1,), values[node.name]).double())
    assert (scale.item(), shift.item()) == (2.0, -2.0)
