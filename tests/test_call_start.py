"""What a call may have changed is set back before it begins anew."""

import torch
from torch import nn

from memopt.call_start import CallStart


class Counting(nn.Module):
    """A buffer and a number that forward counts in, and dropout."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.count = 0

    def forward(self, x):
        self.count += 1
        self.seen += 1
        return torch.dropout(x, 0.5, train=True)


def test_a_restored_call_draws_the_same_numbers_and_counts_once():
    model, x = Counting(), torch.ones(64)
    start = CallStart(model, state=True)
    first = model(x)
    start.restore()
    assert model.count == 0 and model.seen == 0
    assert torch.equal(model(x), first)
    assert model.count == 1 and model.seen == 1


def test_without_state_only_the_random_numbers_are_restored():
    model, x = Counting(), torch.ones(64)
    start = CallStart(model, state=False)
    first = model(x)
    start.restore()
    assert model.count == 1 and model.seen == 1
    assert torch.equal(model(x), first)


def test_a_buffer_that_was_replaced_is_the_same_object_after():
    model = Counting()
    buffer = model.seen
    start = CallStart(model, state=True)
    model.seen = torch.ones(())
    start.restore()
    assert model.seen is buffer
