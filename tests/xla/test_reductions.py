"""Many elements made one, scans, orders and products, as JAX functions."""

import pytest
import torch

from tests.xla.test_lower import of

X = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum((0, 2), keepdim=True) + x.mean(1).sum() + x.prod(1, keepdim=True),
        lambda x: x.to(torch.bfloat16).sum(1, dtype=torch.float32),
        lambda x: x.var(1, correction=0) + x.std((1,), correction=2),
        lambda x: x.amax((0, 1)) + x.amin(2).sum() + x.logsumexp((0, 1)),
        lambda x: x.argmax(1) + x.argmin(1) * 10 + x.argmax(),
        lambda x: x.max(1).values + x.min(1).indices,
        lambda x: (x > 0).any(2) & (x < 3).all(2),
        lambda x: x.cumsum(1) + x.cumprod(0),
        lambda x: x.sort(1, descending=True).indices + x.sort(1).values,
        lambda x: x.topk(2, 1).values + x.topk(2, 1, largest=False).indices,
        lambda x: x.softmax(1) + x.log_softmax(2),
        lambda x: x[0] @ x[1].T + torch.addmm(x[0, :, 0], x[1], x[2].T, beta=0.5, alpha=2),
        lambda x: x @ x.transpose(1, 2),
        lambda x: x[0] @ x[1, 0],
    ],
)
def test_they_are_those_of_torch(function):
    (found,) = of(function, X)
    torch.testing.assert_close(found, function(X), rtol=1e-5, atol=1e-5)
