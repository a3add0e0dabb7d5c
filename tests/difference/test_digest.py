"""Digests: equal for equal values, whatever holds them, and for nothing else."""

import torch

from memopt.difference.digest import bytes_digest, tensor_digest

X = torch.arange(6.0).view(2, 3)


def test_strides_and_lazy_bits_do_not_count():
    assert tensor_digest(X) == tensor_digest(X.t().contiguous().t()) == tensor_digest(X.clone().requires_grad_())
    z = torch.complex(X, X + 1)
    assert tensor_digest(z.conj()) == tensor_digest(torch.complex(X, -X - 1))
    assert tensor_digest(z.conj().imag) == tensor_digest(-(X + 1))


def test_values_shape_and_dtype_do():
    others = [X + 1, X.view(3, 2), X.double(), X.int(), X[:1], torch.zeros(0), torch.zeros(0, 1), X[0, 0]]
    found = [tensor_digest(X), *(tensor_digest(other) for other in others)]
    assert len(set(found)) == len(found)
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))
    assert tensor_digest(torch.zeros(2)) != tensor_digest(torch.zeros(2, dtype=torch.int32)), "the same bytes"


def test_it_is_ten_digits_of_type_and_content():
    assert len(tensor_digest(X)) == 10 and int(tensor_digest(X), 16) >= 0
    assert bytes_digest("a", b"bc") == bytes_digest("a", memoryview(b"bc")) != bytes_digest("ab", b"cd")
