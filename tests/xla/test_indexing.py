"""Elements read and written by index, as JAX functions."""

import pytest
import torch

from memopt.xla.table import LowerError
from tests.xla.test_lower import of

X = torch.arange(24.0).reshape(4, 6)
ROWS, PLACES = torch.tensor([3, 0, 3]), torch.tensor([[5, 0, 5], [1, 1, 2]])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[ROWS, torch.tensor([1, 2, 1])],
        lambda x: x[:, ROWS],
        lambda x: x.index_put((ROWS,), torch.ones(6), accumulate=True),
        lambda x: x.index_put((torch.tensor([1, 2]),), torch.ones(6)),
        lambda x: x.index_select(1, ROWS),
        lambda x: x.gather(1, PLACES),
        lambda x: x.scatter(0, torch.tensor([[2, 1]]), torch.tensor([[-1.0, -2.0]])),
        lambda x: x.scatter(1, PLACES, -3.0),
        lambda x: x.scatter_add(1, PLACES, torch.ones(2, 3)),
        lambda x: torch.nn.functional.embedding(ROWS, x),
        lambda x: torch.ops.aten.embedding_dense_backward(x[:3], ROWS, 5, 0, False),
    ],
)
def test_they_are_those_of_torch(function):
    (found,) = of(function, X)
    torch.testing.assert_close(found, function(X), rtol=1e-6, atol=0.0)


def test_gradients_by_how_often_a_row_is_read_are_refused():
    with pytest.raises(LowerError, match="scale_grad_by_freq has no form"):
        of(lambda x: torch.ops.aten.embedding_dense_backward(x[:3], ROWS, 5, -1, True), X)
