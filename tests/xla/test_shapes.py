"""Tensors in other shapes, parts of them, and parts put together, as JAX functions."""

import pytest
import torch
from torch.nn import functional

from tests.xla.test_lower import of

X = torch.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.reshape(6, -1),
        lambda x: x.view(torch.int32),
        lambda x: x[:, :1].expand(2, 5, -1),
        lambda x: x.permute(2, 0, -2),
        lambda x: x.transpose(-1, 0),
        lambda x: x[0].t(),
        lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze((1, -1)),
        lambda x: x[:, -2:, 1:4:2],
        lambda x: x[1, 2],
        lambda x: torch.cat([x, x[:, :1]], 1),
        lambda x: torch.stack([x, -x], -1),
        lambda x: x.split([1, 2], 1)[1],
        lambda x: x.unbind(2)[3],
        lambda x: functional.pad(x, (1, 2, -1, 0), value=7.0),
        lambda x: x.flip((0, 2)),
        lambda x: x.roll((1, -1), (0, 2)),
        lambda x: x.tril(-1) + x.triu(1),
        lambda x: x.diagonal(dim1=1, dim2=2),
        lambda x: torch.as_strided(x, (2, 2), (12, 5), 1),
    ],
)
def test_they_are_those_of_torch(function):
    (found,) = of(function, X)
    torch.testing.assert_close(found, function(X), rtol=0.0, atol=0.0)


def test_gradients_of_parts_lie_where_the_parts_were():
    aten, part, row = torch.ops.aten, torch.ones(2, 1, 4), torch.ones(2, 4)

    def backward(part, row):
        sizes = [2, 3, 4]
        return aten.slice_backward(part, sizes, 1, 0, 3, 3), aten.select_backward(row, sizes, 1, 2)

    for found, expected in zip(of(backward, part, row), backward(part, row), strict=True):
        torch.testing.assert_close(found, expected)
