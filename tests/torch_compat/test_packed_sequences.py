"""Packed sequences on fake tensors."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from memopt.torch_compat.packed_sequences import Unpacking, turned


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("total", [None, 9])
def test_padding_gives_what_torch_gives_and_its_gradients(first, total):
    x, lengths = torch.randn((4, 6, 3) if first else (6, 4, 3), requires_grad=True), torch.tensor([6, 2, 2, 1])
    found = []
    for way in (torch.enable_grad, Unpacking):
        packed = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False)
        with way():
            padded, sizes = pad_packed_sequence(packed, batch_first=first, padding_value=2.0, total_length=total)
        (gradient,) = torch.autograd.grad(padded.square().sum(), x)
        found.append((padded, sizes, gradient))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_sizes_of_batches_stay_as_they_are():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(1)])
    double, (other, number) = turned(lambda tensor: tensor * 2, (packed, (torch.ones(2), 5)))
    assert isinstance(double, PackedSequence) and double.batch_sizes is packed.batch_sizes
    assert double.data.tolist() == [2.0] * 4 and other.tolist() == [2.0, 2.0] and number == 5
